"""Names that clients choose: whatever they are, what the pod writes lies where its layout says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.pod import Pod
from tests.server.wire import Wire

NAMES = (
    *("..", ".", "../../x", "/x", "x/../../y", "%2e%2e%2fx", "..%2fx", "x\\..\\y", "x//y", "x/", "\x00", "x\x00y", ""),
    *(
        "x\n",
        "\uff0e\uff0e\uff0fx",
        "\u2024\u2024/x",
        "x\u202ey",
        "x" * 5_000,
        "~",
        "$HOME",
        "-rf",
        ".hidden",
    ),
)
GOOD = "a.b_C-1"
PASSED_ON = re.compile(r"[A-Za-z0-9._-]{1,255}")
"""What the gateway lets a client read, if it is of its own model."""
OWN = re.compile(
    r"identity\.json|epochs(/\d{8}\.json)?|journal(/\d{8}(-\d{4,})?\.(log|base))?"
    r"|models(/m-[0-9a-f]{12}(/(snapshots|checkpoints(/weights|/sampler_weights|/external_weights)?)"
    r"(/\d+-\d+(\.\d+)?(/state\.safetensors|/manifest\.json|(/adapter_model\.safetensors|/adapter_config\.json|/README\.md)(\.age)?)?)?)?)?"
)
"""The files and directories of a session, and no others."""


@pytest.fixture
def wire(pod: Pod) -> Iterator[Wire]:
    """A client of the running pod, with a model."""
    wire = Wire(pod)
    yield wire.created()
    wire.client.close()


def outcome(wire: Wire, name: str, body: dict[str, Any], weights: str | None = None) -> dict[str, Any]:
    """What an operation comes to; `weights` is the path that the gateway lets the client read."""
    headers = {"Content-Type": "application/json"} | ({} if weights is None else {"X-Everloop-Weights": weights})
    # As text, for what no UTF-8 can say.
    accepted = wire.client.post(f"/api/v1/{name}", content=json.dumps(body), headers=headers)
    assert accepted.status_code == 200, accepted.text
    answer: dict[str, Any] = wire.retrieve(accepted.json()["request_id"]).json()
    return answer


def everything(directory: Path) -> set[str]:
    """Every name below a directory, but files that are just being written and the sockets of processes."""
    found = (path.relative_to(directory) for path in directory.rglob("*") if ".tmp-" not in path.name)
    return {str(path) for path in found if path.parts[0] != "run"}


def test_no_name_leads_out_of_the_sessions_root(pod: Pod, wire: Wire) -> None:
    """Each is refused by its field, and nothing is written or read by it; a good one is kept under no name at all."""
    around = everything(pod.directory) - {f"volume/team/tiny/{name}" for name in everything(pod.root)}
    numbers = iter(range(1, 10_000))
    for name in NAMES:
        path = f"tinker://{wire.model}/weights/{name}"
        operation = {"model_id": wire.model}
        for kind in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
            refused = outcome(wire, kind, {**operation, "seq_id": next(numbers), "path": name})
            assert (refused["category"], refused["error"].startswith("path: ")) == ("user", True), (kind, name)
        load = {**operation, "seq_id": next(numbers), "path": path, "optimizer": True}
        refused = outcome(wire, "load_weights", load, weights=path if PASSED_ON.fullmatch(name) else None)
        assert (refused["category"], refused["error"].startswith("path: ")) == ("user", True), name
    good = outcome(wire, "save_weights", {**operation, "seq_id": next(numbers), "path": GOOD})
    assert good["path"] == f"tinker://{wire.model}/weights/{GOOD}"
    written = everything(pod.root)
    assert [name for name in written if not OWN.fullmatch(name)] == []
    assert everything(pod.directory) - {f"volume/team/tiny/{name}" for name in written} == around
