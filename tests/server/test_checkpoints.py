"""Checkpoints that users remove and that expire, by the unmodified SDK; the server is killed meanwhile."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any

from everloop_trainer.session.identifiers import storage_id
from tests.server.pod import Pod, eventually, kill_process, process_of
from tests.server.sdk import CheckpointProgram
from tests.server.stub import Stub
from tests.server.test_survival import model_of
from tests.server.wire import Wire

ROUNDS = 8

METADATA = {"renderer": "qwen3", "run": "7"}


def files(pod: Pod, model: str) -> list[str]:
    """The states of a model's checkpoints on disk, one of which may go while they are read."""
    below = pod.root / "models" / storage_id(model) / "checkpoints"
    while True:
        try:
            return sorted(path.parent.name for path in below.rglob("state.*"))
        except FileNotFoundError:
            continue


def reached(program: CheckpointProgram, number: int) -> bool:
    """Whether the program has ended that round."""
    return len(program.named("round")) > number


def test_rolling_checkpoints_while_the_server_is_killed(own_pod: Pod, gateway: Stub) -> None:
    """No exception, one checkpoint left, one removal each in the journal, and no file of the others."""
    with CheckpointProgram(gateway.url, "rolling", rounds=ROUNDS) as program:
        for number in (0, 2, 4):
            eventually(partial(reached, program, number), f"round {number}", 60)
            kill_process(process_of(own_pod, "server"))
        program.finish()
    (listed,) = program.named("listed")
    assert listed == {"event": "listed", f"weights/r{ROUNDS - 1}": None}
    model = model_of(program)
    eventually(lambda: len(files(own_pod, model)) == 1, "the files of the others are gone", 30)
    records = [record for record in own_pod.journal() if record.get("s") == model]
    removed = [record["key"] for record in records if record["t"] == "removed"]
    assert len(removed) == len(set(removed)) == ROUNDS - 1
    assert {record["key"] for record in records if record["t"] == "dropped"} == set(removed)


def test_lifetimes_are_told_and_changed(own_pod: Pod, gateway: Stub) -> None:
    """expires_at as asked, set anew and taken away; what is wrong is refused by its field and changes nothing.

    Their owner reads back what the run was made with, and the pod tells what each part of the step has taken.
    """
    with CheckpointProgram(gateway.url, "lifetimes", user_metadata=METADATA) as program:
        program.finish()
    assert program.named("run")[0]["user_metadata"] == METADATA
    seconds = (own_pod.status() or {})["work"]["stepSeconds"]
    assert {part for part, taken in seconds.items() if float(taken) > 0} >= {"forward", "backward", "journal"}
    first, second = program.named("listed")

    def lives(listing: dict[str, Any], name: str) -> timedelta:
        created = {one["checkpoint_id"]: one["time"] for one in checkpoints}[name]
        return datetime.fromisoformat(listing[name]) - datetime.fromisoformat(created)

    model = model_of(program)
    checkpoints = own_pod.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert lives(first, "weights/brief") == timedelta(hours=1)
    assert first["weights/ever"] is None
    assert set(first) == {"event", "weights/brief", "weights/ever", "sampler_weights/thin"}
    assert set(second) == {"event", "weights/brief", "weights/ever"}
    assert second["weights/brief"] is None
    assert timedelta(days=1) <= lives(second, "weights/ever") < timedelta(days=1, minutes=5)
    refused = {event["name"]: event for event in program.named("refused")}
    expected = {
        "short": ("BadRequestError", "ttl_seconds: must be between 3600"),
        "missing": ("NotFoundError", "/weights/none"),
        "missing ttl": ("NotFoundError", "/sampler_weights/thin"),
        "save": ("RequestFailedError", "ttl_seconds: must be between 3600"),
        "load": ("RequestFailedError", "/sampler_weights/thin"),
    }
    assert {name: event["type"] for name, event in refused.items()} == {
        name: kind for name, (kind, _) in expected.items()
    }
    for name, (_, words) in expected.items():
        assert words in refused[name]["message"], name
    eventually(lambda: len(files(own_pod, model)) == 2, "what was replaced and removed has no file", 30)


def test_bad_changes_name_what_is_wrong(own_pod: Pod) -> None:
    """A body without its field, of another type, and a key that is too long."""
    with Wire(own_pod).client as client:
        url = "/api/v1/training_runs/s-1:train:0/checkpoints/weights/x"
        for body in ({}, {"ttl_seconds": "3600"}, {"ttl_seconds": True}, {"ttl_seconds": 10**12}):
            answer = client.put(f"{url}/ttl", json=body)
            assert answer.status_code == 400
            assert answer.json()["detail"].startswith("ttl_seconds: ")
        answer = client.request("DELETE", url, headers={"X-Idempotency-Key": "k" * 201})
        assert answer.status_code == 400
        assert answer.json()["detail"].startswith("x-idempotency-key: ")
        assert client.request("DELETE", url).status_code == 404
