"""The SDK's command line, unmodified, command by command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server import tinymodel
from tests.server.pod import Pod
from tests.server.sdk import run_commands
from tests.server.stub import Stub
from tests.server.wire import Wire


def test_every_command_that_is_served(pod: Pod, stub: Stub, tmp_path: Path) -> None:
    """Its effect is seen through another one; downloads need a gateway, see the tests of conformance."""
    wire = Wire(pod)
    with wire.client:
        wire.created()
        for number, name in enumerate(("one", "two", "three"), 1):
            saved = wire.post("save_weights", {"model_id": wire.model, "seq_id": number, "path": name}).json()
            wire.retrieve(saved["request_id"])
    run = wire.model
    one, two, three = (f"tinker://{run}/weights/{name}" for name in ("one", "two", "three"))
    commands: list[tuple[str, list[str]]] = [
        ("version", ["version"]),
        ("all", ["checkpoint", "list", "--limit", "0"]),
        ("of the run", ["checkpoint", "list", "--run-id", run]),
        ("", ["checkpoint", "set-ttl", one, "--ttl", "7200"]),
        ("", ["checkpoint", "publish", one]),
        ("changed", ["checkpoint", "info", one]),
        ("", ["checkpoint", "set-ttl", one, "--remove"]),
        ("", ["checkpoint", "unpublish", one]),
        ("changed back", ["checkpoint", "info", one]),
        ("deleted", ["checkpoint", "delete", "-y", one, f"{two}-none"]),
        ("left", ["checkpoint", "list", "--run-id", run]),
        ("deleted too", ["checkpoint", "delete", "-y", "--run-id", run, "--type", "weights"]),
        ("none left", ["checkpoint", "list", "--run-id", run]),
        ("gone", ["checkpoint", "info", one]),
        ("run", ["run", "info", run]),
    ]
    told: dict[str, dict[str, Any]] = {}
    for (name, _), ended in zip(
        commands, run_commands(stub.url, *(command for _, command in commands), directory=tmp_path), strict=True
    ):
        assert name in ("gone", "") or ended["code"] == 0, (name, ended)
        assert name or ended == {"code": 0, "out": "", "error": ""}
        told[name] = ended

    def shown(name: str) -> Any:
        return json.loads(told[name]["out"])

    assert told["version"]["out"].startswith("tinker 0.")
    assert {one, two, three} <= {each["tinker_path"] for each in shown("all")["checkpoints"]}
    assert {each["tinker_path"] for each in shown("of the run")["checkpoints"]} == {one, two, three}
    assert (shown("changed")["public"], shown("changed")["expires_at"] is None) == (True, False)
    assert (shown("changed back")["public"], shown("changed back")["expires_at"]) == (False, None)
    assert shown("changed")["lora_rank"] == 4
    assert shown("deleted")["deleted_count"] == 1
    assert [each["tinker_path"] for each in shown("deleted")["failed"]] == [f"{two}-none"]
    assert {each["tinker_path"] for each in shown("left")["checkpoints"]} == {two, three}
    assert shown("deleted too") == {"deleted_count": 2, "failed": []}
    assert shown("none left")["checkpoints"] == []
    assert "not found" in told["gone"]["error"]
    assert told["gone"]["code"] != 0
    assert shown("run")["base_model"] == tinymodel.NAME
