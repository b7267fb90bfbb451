"""The files of external weights, as a pod gives them to its gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyrage
import pytest

from everloop_trainer.session.identifiers import storage_id
from tests.server.pod import Pod
from tests.server.wire import Wire, texts

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture
def wire(pod: Pod) -> Iterator[Wire]:
    """A client of the running pod, with a model that has made a step."""
    wire = Wire(pod)
    wire.created()
    wire.retrieve(wire.forward_backward(1, texts(1, 1, 8)).json()["request_id"])
    wire.retrieve(wire.optim_step(2).json()["request_id"])
    yield wire
    wire.client.close()


def saved(wire: Wire, seq: int, name: str, **fields: Any) -> dict[str, Any]:
    """What a save comes to."""
    body = {"model_id": wire.model, "seq_id": seq, "path": name, "ttl_seconds": 3600, **fields}
    answer: dict[str, Any] = wire.retrieve(wire.post("save_weights_external", body).json()["request_id"]).json()
    return answer


def files(wire: Wire, name: str) -> str:
    return f"/api/v1/training_runs/{wire.model}/checkpoints/external_weights/{name}/files"


def directory(pod: Pod, wire: Wire, key: str) -> Path:
    return pod.root / "models" / storage_id(wire.model) / "checkpoints" / "external_weights" / key


def test_files_come_whole_and_in_part(pod: Pod, wire: Wire) -> None:
    """Those that PEFT knows, by the key of what was saved; none that is Everloop's own, and nothing else."""
    told = saved(wire, 3, "out")
    assert (told["path"], told["type"]) == (f"tinker://{wire.model}/external_weights/out", "save_weights_external")
    listed = wire.client.get(files(wire, "out")).json()
    place = directory(pod, wire, listed["key"])
    assert listed["files"] == FILES
    assert told["size_bytes"] == (place / FILES[2]).stat().st_size
    for name in FILES:
        assert wire.client.get(f"{files(wire, 'out')}/{listed['key']}/{name}").content == (place / name).read_bytes()
    content = (place / FILES[2]).read_bytes()
    url = f"{files(wire, 'out')}/{listed['key']}/{FILES[2]}"
    part = wire.client.get(url, headers={"Range": f"bytes=100-{len(content) - 1}"})
    assert (part.status_code, part.content) == (206, content[100:])
    assert part.headers["x-everloop-pod-uid"] == pod.uid
    for bad in (
        url.replace(listed["key"], "9-9"),
        url.replace("/out/", "/none/"),
        url.replace(FILES[2], "state.safetensors"),
        url.replace(FILES[2], "manifest.json"),
        url.replace(FILES[2], "%2e%2e%2fmanifest.json"),
        url.replace(FILES[2], f"{FILES[2]}.age"),
        url.replace("external_weights", "weights"),
    ):
        assert wire.client.get(bad).status_code == 404, bad
    (one,) = wire.client.get(f"/api/v1/training_runs/{wire.model}/checkpoints").json()["checkpoints"]
    assert (one["checkpoint_id"], one["checkpoint_type"]) == ("external_weights/out", "external")
    assert wire.client.request("DELETE", files(wire, "out").removesuffix("/files")).status_code == 200
    assert wire.client.get(files(wire, "out")).status_code == 404
    assert wire.client.get(url).status_code == 404


def test_encrypted_files_are_for_their_recipients(pod: Pod, wire: Wire) -> None:
    """Who has a key reads what was saved in the open; on the volume nothing of it is."""
    saved(wire, 3, "open")
    own = pyrage.x25519.Identity.generate()
    told = saved(wire, 4, "sealed", age_encryption_recipients=[str(own.to_public())])
    places = {}
    for name in ("open", "sealed"):
        listed = wire.client.get(files(wire, name)).json()
        places[name] = directory(pod, wire, listed["key"])
    assert wire.client.get(files(wire, "sealed")).json()["files"] == [f"{name}.age" for name in FILES]
    present = {path.name for path in places["sealed"].iterdir()}
    assert present == {f"{name}.age" for name in FILES} | {"state.safetensors", "manifest.json"}
    for name in FILES[1:]:
        sealed = wire.client.get(f"{files(wire, 'sealed')}/{places['sealed'].name}/{name}.age").content
        plain = pyrage.decrypt(sealed, [own])
        tail = len(plain) // 2  # the number of the save is in the head of the weights
        assert plain[tail:] == (places["open"] / name).read_bytes()[tail:]
    assert told["size_bytes"] == len(sealed)
    refused = saved(wire, 5, "other", age_encryption_recipients=["age1none"])
    assert (refused["category"], refused["error"].partition(":")[0]) == ("user", "age_encryption_recipients[0]")


def test_an_archive_comes_whole_and_in_part(wire: Wire) -> None:
    """Of a training checkpoint, made while it is read: any range of it is the same as in the whole."""
    wire.retrieve(wire.post("save_weights", {"model_id": wire.model, "seq_id": 3, "path": "half"}).json()["request_id"])
    url = f"/api/v1/training_runs/{wire.model}/checkpoints/weights/half/files"
    listed = wire.client.get(url).json()
    assert listed["files"] == ["checkpoint.tar"]
    url = f"{url}/{listed['key']}/checkpoint.tar"
    whole = wire.client.get(url)
    size = len(whole.content)
    assert int(whole.headers["content-length"]) == size
    for asked, start, end in (("100-", 100, size), ("7-99999999999", 7, size), (f"600-{size - 2}", 600, size - 1)):
        part = wire.client.get(url, headers={"Range": f"bytes={asked}"})
        assert (part.status_code, part.content) == (206, whole.content[start:end])
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    assert wire.client.get(url, headers={"Range": f"bytes={size}-"}).status_code == 416
    other = {"Range": "bytes=5-9", "If-Range": '"another"'}
    assert wire.client.get(url, headers=other).content == whole.content
    assert wire.client.get(url.replace(listed["key"], "9-9")).status_code == 404
