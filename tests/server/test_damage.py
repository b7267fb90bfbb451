"""Stored bytes that are not what they were, under a real server: one model stops loudly, the others are served."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from everloop_trainer.session.identifiers import storage_id
from tests.server.pod import Pod, eventually, kill_process
from tests.server.sdk import SdkProgram
from tests.server.stub import Stub
from tests.server.test_survival import adapter, assert_equal_states, model_of
from tests.server.wire import Wire, forward_backward_body, texts

HALF = 3
"""Number of the checkpoint that a loop of one step saves after it."""
TINY = {"steps": 1, "sequences": 2, "length": 16}


@contextmanager
def damaged(path: Path, what: bytes) -> Iterator[None]:
    """One bit of the file is another as long as the block lasts."""
    content = path.read_bytes()
    assert content.count(what) == 1
    place = content.index(what) + len(what) // 2

    def flip() -> None:
        with path.open("r+b", buffering=0) as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    flip()
    yield
    flip()


def told(pod: Pod) -> str:
    """What /status says of the storage."""
    status = pod.status()
    return "" if status is None else str(status["storage"]["error"])


def held(wire: Wire, request: str) -> None:
    """The poll is not answered while a client has patience for it, which is less than a server's."""
    with pytest.raises(httpx.ReadTimeout):
        wire.post("retrieve_future", {"request_id": request}, timeout=1)


def test_damage_in_the_journal_stops_the_model_that_it_is_of(own_pod: Pod) -> None:
    """A result and a request that cannot be read back: the server stays, says so, and serves the other model."""
    (journal,) = (own_pod.root / "journal").iterdir()
    before = own_pod.wait_until("Serving")
    server = own_pod.child("server")
    data = texts(1, 2, 16)
    one, two, three = (Wire(own_pod) for _ in range(3))
    with one.client, two.client, three.client:
        for wire in (one, two, three):
            wire.created()
        result = one.retrieve(one.forward_backward(1, data).json()["request_id"]).content
        with damaged(journal, result):
            held(one, f"{one.model}:1")
            assert f"{one.model} is stopped: journal/{journal.name}: the record at offset" in told(own_pod)
            os.kill(before["engine"]["pid"], signal.SIGSTOP)
            running = two.forward_backward(1, data).json()["request_id"]
            waiting = three.forward_backward(1, data).json()["request_id"]
            with damaged(journal, forward_backward_body(three.model, 1, data)):
                os.kill(before["engine"]["pid"], signal.SIGCONT)
                assert two.retrieve(running).status_code == 200
                eventually(lambda: f"{three.model} is stopped: journal/{journal.name}" in told(own_pod), "it says so")
                held(three, waiting)
                assert two.retrieve(two.optim_step(2).json()["request_id"]).status_code == 200
                assert f"{two.model} is stopped" not in told(own_pod)
        assert own_pod.child("server") == server
        kill_process(before["engine"]["pid"])
        assert three.retrieve(waiting).content == two.retrieve(running).content
        assert one.retrieve(f"{one.model}:1").content == result
        for wire in (one, three):
            assert wire.retrieve(wire.optim_step(2).json()["request_id"]).status_code == 200
    status = own_pod.wait_until("Serving")
    assert (status["storage"]["error"], status["replayMismatches"]) == ("", 0)
    assert status["incarnation"] == before["incarnation"]


def test_a_server_that_starts_with_damage_serves_the_other_models(own_pod: Pod) -> None:
    """A request that a replay needs cannot be read back: its model waits for a server that finds it mended."""
    (journal,) = (own_pod.root / "journal").iterdir()
    before = own_pod.wait_until("Serving")
    data = texts(1, 2, 16)
    one, two = Wire(own_pod), Wire(own_pod)
    with one.client, two.client:
        for wire in (one, two):
            wire.created()
            assert wire.retrieve(wire.forward_backward(1, data).json()["request_id"]).status_code == 200
    with damaged(journal, forward_backward_body(one.model, 1, data)):
        status = restart(own_pod)
        assert status["incarnation"]["number"] == before["incarnation"]["number"] + 1
        one.client, two.client = again(own_pod), again(own_pod)
        with one.client, two.client:
            waiting = one.optim_step(2).json()["request_id"]
            assert two.retrieve(two.optim_step(2).json()["request_id"]).status_code == 200
            reason = f"{one.model} is stopped: could not be restored: journal/{journal.name}: the record at offset"
            assert reason in told(own_pod)
            held(one, waiting)
    status = restart(own_pod)
    one.client = again(own_pod)
    with one.client:
        assert one.retrieve(waiting).status_code == 200
    assert (status["storage"]["error"], status["replayMismatches"]) == ("", 0)


def again(pod: Pod) -> httpx.Client:
    """A client on whom no server has hung up."""
    return httpx.Client(base_url=pod.url, headers=pod.headers, timeout=60)


def restart(pod: Pod) -> dict[str, Any]:
    """Kill the server; the status of its successor, once that serves."""
    server = eventually(lambda: pod.child("server"), "a server")
    kill_process(server)
    eventually(lambda: pod.child("server") not in (None, server), "another server")
    return pod.wait_until("Serving")


def test_a_damaged_checkpoint_is_a_users_error(own_pod: Pod, gateway: Stub) -> None:
    """From the SDK: no new model begins with it, one that is there trains on as if it had loaded nothing."""
    with SdkProgram(gateway.url, "train", seed=3, save_after=1, **TINY) as program:
        program.finish()
    path = program.named("half")[0]["path"]
    directory = own_pod.root / "models" / storage_id(model_of(program)) / "checkpoints" / "weights"
    (state,) = directory.glob(f"*-{HALF}*/state.safetensors")
    with (
        damaged(state, state.read_bytes()),
        SdkProgram(gateway.url, "resume", path=path, optimizer=False, start=0, **TINY) as plain,
        SdkProgram(gateway.url, "resume", path=path, optimizer=True, start=0, **TINY) as whole,
        SdkProgram(gateway.url, "reload", seed=4, path=path) as kept,
        SdkProgram(gateway.url, "reload", seed=4, path=f"{path}-not") as other,
    ):
        for each in (plain, whole, kept, other):
            each.finish()
    assert [len(each.named("refused")) for each in (plain, whole, kept)] == [1, 1, 2]
    assert not plain.named("created")
    for refused in (*plain.named("refused"), *whole.named("refused"), *kept.named("refused")):
        assert refused["category"] == "user"
        assert f"path: the storage does not hold '{path}' as it was saved" in refused["message"]
    assert_equal_states(adapter(own_pod, model_of(kept)), adapter(own_pod, model_of(other)))
