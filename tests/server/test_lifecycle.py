"""How a server begins and ends: drain, fence, storage of another model, bad configuration. No engine is needed."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from everloop_trainer import exitcodes
from everloop_trainer.server.app import POLL_SECONDS
from tests.server.pod import Pod, eventually
from tests.server.wire import Wire, texts

MakePod = Callable[..., Pod]


@pytest.fixture
def server(make_pod: MakePod) -> Iterator[Pod]:
    """A pod whose container is the server alone, ready."""
    pod = make_pod()
    pod.start("server")
    pod.wait_until("Starting")
    yield pod
    pod.end()


def test_operations_are_accepted_before_there_is_an_engine(held_poll: Any) -> None:
    """The server is ready, accepts and journals; a poll is held, and then told why the client has to wait."""
    pod = held_poll.pod
    assert httpx.get(f"{pod.url}/readyz").status_code == 200
    assert [record["t"] for record in pod.journal()] == ["open", "accept"]
    answer, ended = held_poll.answer.result(timeout=2 * POLL_SECONDS)
    assert POLL_SECONDS - 1 < ended - held_poll.begun < POLL_SECONDS + 5
    assert answer.status_code == 408
    told = answer.json()
    assert "engine" in told.pop("queue_state_reason")
    assert told == {"type": "try_again", "request_id": held_poll.request_id, "queue_state": "paused_capacity"}


def test_sigterm_ends_polls_and_exits_zero(server: Pod) -> None:
    """A held poll is answered 503 at once, so that the gateway comes again; the process ends with 0."""
    wire = Wire(server)
    with wire.client, socket.create_connection((server.ip, 8080)) as poll:
        request = wire.create_model().json()["request_id"]
        body = json.dumps({"request_id": request}).encode()
        head = [f"{name}: {value}" for name, value in (server.headers | {"Content-Length": str(len(body))}).items()]
        poll.sendall("\r\n".join(["POST /api/v1/retrieve_future HTTP/1.1", "Host: pod", *head, "", ""]).encode() + body)
        poll.settimeout(0.3)
        with pytest.raises(TimeoutError):
            poll.recv(1)
        assert server.stop() == 0
        poll.settimeout(5)
        assert poll.recv(100).startswith(b"HTTP/1.1 503")


def test_a_restart_in_place_goes_on_with_what_was_accepted(server: Pod) -> None:
    """The same pod claims boot + 1, knows the operation, and takes its repeat for one."""
    wire = Wire(server)
    with wire.client:
        wire.create_model()
        server.kill()
        server.start("server")
        status = server.wait_until("Recovering")
        assert status["incarnation"] == {"number": 2, "attempt": 1, "boot": 2, "podUID": server.uid}
        assert wire.create_model().status_code == 200
    assert [record["t"] for record in server.journal()] == ["open", "accept", "open"]


def test_a_superseded_server_misdirects_and_exits_fenced(server: Pod, make_pod: MakePod) -> None:
    """Once a greater attempt claimed the storage, the old server acknowledges nothing more and ends with 64."""
    wire = Wire(server)
    with wire.client:
        other = make_pod(attempt=2, uid="uid-2")
        other.use_storage_of(server)
        other.start("server")
        other.wait_until("Starting")
        try:
            answer = wire.create_model()
            assert answer.status_code == 421
        except httpx.TransportError:
            pass  # it noticed by itself and is gone already
        assert server.container.wait(timeout=10) == exitcodes.FENCED
        assert [record["t"] for record in other.journal()] == ["open", "open"]
        # A restart of the old container by its kubelet is no new claim.
        server.start("server")
        assert server.container.wait(timeout=20) == exitcodes.FENCED
        assert "superseded" in (server.directory / "termination").read_text()
        assert other.status() is not None


def test_storage_of_another_base_model_ends_the_container(server: Pod) -> None:
    """Exit code 65 and a termination message that names both revisions."""
    server.kill()
    base = json.loads(server.environment["EVERLOOP_CONFIG"])["baseModel"]
    server.configure(baseModel=base | {"revision": "r2"})
    server.start()
    assert server.container.wait(timeout=30) == exitcodes.STORAGE_MISMATCH
    message = (server.directory / "termination").read_text()
    assert message.startswith("StorageMismatch: ")
    assert "'r1'" in message
    assert "'r2'" in message


def test_a_bad_configuration_ends_the_container(make_pod: MakePod) -> None:
    """Exit code 78 and a termination message that names the field."""
    pod = make_pod()
    pod.configure(attempt=0)
    pod.start()
    assert pod.container.wait(timeout=30) == exitcodes.BAD_CONFIGURATION
    assert "attempt" in (pod.directory / "termination").read_text()


def test_lost_storage_fails_the_server_and_the_next_one_takes_over(make_pod: MakePod) -> None:
    """Storage that cannot be written ends the server with 66; nothing is acknowledged."""
    pod = make_pod()
    pod.root.parent.parent.mkdir(parents=True)
    pod.root.parent.write_text("a file where the directory should be")
    pod.start("server")
    assert pod.container.wait(timeout=30) == exitcodes.STORAGE_FAILED
    pod.root.parent.unlink()
    pod.start("server")
    pod.wait_until("Starting")


def test_a_write_that_fails_ends_the_server_and_nothing_was_acknowledged(server: Pod) -> None:
    """A torn write of the journal is no answer; the next server drops the tail and takes the repeat as new."""
    wire = Wire(server)
    with wire.client:
        assert wire.create_model().status_code == 200
        limit = 1 << 16  # above the log's size, below that of the next request
        resource.prlimit(server.container.pid, resource.RLIMIT_FSIZE, (limit, limit))
        try:
            assert wire.forward_backward(1, texts(1, 64, 100)).status_code == 503
        except httpx.TransportError:
            pass  # it was gone before it could say so
        assert server.container.wait(timeout=10) == exitcodes.STORAGE_FAILED
        server.start("server")
        server.wait_until("Recovering")
        assert [record["t"] for record in server.journal()] == ["open", "accept", "open"]
        assert wire.retrieve(f"{wire.model}:1").status_code == 410
        assert wire.forward_backward(1, texts(1, 64, 100)).status_code == 200


def test_the_token_is_in_no_log(server: Pod) -> None:
    """Neither token nor Authorization header appears in what the pod prints."""
    httpx.get(f"{server.url}/status", headers={"Authorization": "Bearer guess-1234"})
    eventually(lambda: "session open" in server.log.read_text(), "the log was written", 5)
    text = server.log.read_text()
    assert server.headers["Authorization"].removeprefix("Bearer ") not in text
    assert "guess-1234" not in text
    assert all(json.loads(line)["event"] for line in text.splitlines())
