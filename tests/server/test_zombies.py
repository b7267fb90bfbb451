"""Real servers that are stopped in the middle of something, superseded, and let go: what each of them still does.

The pod that took over has what they had made durable, and nothing of it twice; they tell nobody anything that it does
not know, and end as fenced.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from everloop_trainer import exitcodes
from everloop_trainer.session.identifiers import storage_id
from tests.networks import new_address
from tests.server.pod import REPOSITORY, Pod, eventually
from tests.server.stub import serving
from tests.server.wire import Wire, forward_backward_body, texts

MISDIRECTED = 421
UNAWARE = "1e6"
WIRES: list[Wire] = []
"""Clients of the running test."""


class StoppingPod(Pod):
    """A pod whose server is `tests.server.stopping_server`, as process 1."""

    def __init__(self, *arguments: Any, fence_interval: str = UNAWARE, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.environment |= {
            "PYTHONPATH": f"{REPOSITORY / 'trainer_image'}:{REPOSITORY}",
            "STOP_AT": str(self.directory / "stop-at"),
            "FENCE_INTERVAL": fence_interval,
        }

    def start(self, role: str = "tests.server.stopping_server") -> None:
        with self.log.open("ab") as log:
            self._container = subprocess.Popen(
                [sys.executable, "-m", role], env=self.environment, stdout=log, stderr=log, cwd=self.directory
            )

    def stop_at(self, moment: str, pattern: str) -> None:
        """Where to stop from now on, once."""
        unfinished = self.directory / "stop-at.new"
        unfinished.write_text(f"{moment} {pattern}")
        unfinished.rename(self.directory / "stop-at")

    def await_stopped(self) -> None:
        """Return once it stands still."""
        state = Path(f"/proc/{self.container.pid}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", f"stopped; log: {self.log}", 30)

    def let_go(self) -> None:
        self.container.send_signal(signal.SIGCONT)

    def exit_code(self) -> int:
        return self.container.wait(timeout=30)

    @property
    def last_words(self) -> str:
        """The container's termination message."""
        return (self.directory / "termination").read_text()


@pytest.fixture
def session(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., StoppingPod]]:
    """Makes and starts the pods of one session; what runs at the end is killed."""
    pods: list[StoppingPod] = []

    def make(attempt: int, uid: str = "", state: str = "Serving", revision: str = "r1", **options: Any) -> StoppingPod:
        pod = StoppingPod(
            tmp_path / f"pod-{len(pods)}", new_address(), tiny_model, attempt, uid or f"uid-{attempt}", **options
        )
        if pods:
            pod.use_storage_of(pods[0])
        if revision != "r1":
            pod.configure(baseModel={"name": "everloop/tiny-llama", "revision": revision, "path": str(tiny_model)})
        pods.append(pod)
        pod.start()
        if state:
            pod.wait_until(state)
        return pod

    yield make
    for pod in pods:
        pod.end()
    while WIRES:
        WIRES.pop().client.close()


@pytest.fixture
def later() -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Calls in the background."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def wired(pod: Pod) -> Wire:
    """A client with a model, until the end of the test."""
    WIRES.append(Wire(pod))
    return WIRES[-1].created()


def at(pod: Pod, wire: Wire) -> Wire:
    """The same client, speaking to another pod."""
    other = Wire(pod)
    WIRES.append(other)
    other.session, other.model = wire.session, wire.model
    return other


def step(wire: Wire, number: int) -> None:
    """forward_backward and optim_step number `number`, both finished."""
    for seq in (2 * number - 1, 2 * number):
        body = forward_backward_body(wire.model, seq, texts(seq, 1, 8))
        answer = wire.post_protobuf(body) if seq % 2 else wire.optim_step(seq)
        assert wire.retrieve(answer.json()["request_id"]).status_code == 200


def records(pod: Pod, kind: str, model: str) -> list[tuple[int, int]]:
    """(number, incarnation) of the records of a kind of one model, in order."""
    return [
        (record["n"], record["incarnation"])
        for record in pod.journal()
        if record["t"] == kind and record.get("s") == model
    ]


def test_stopped_between_flush_and_fence(session: Callable[..., StoppingPod], later: Callable[..., Any]) -> None:
    """The operation is its successor's, which has read it; the zombie acknowledges nothing."""
    old = session(1)
    wire = wired(old)
    old.stop_at("flushed", "journal")
    call = later(wire.optim_step, 1)
    old.await_stopped()
    new = session(2)
    old.let_go()
    assert call.result().status_code == MISDIRECTED
    assert old.exit_code() == exitcodes.FENCED
    again = at(new, wire)
    assert again.retrieve(again.optim_step(1).json()["request_id"]).status_code == 200
    assert records(new, "accept", wire.model) == [(0, 1), (1, 1)]
    assert records(new, "result", wire.model) == [(0, 1), (1, 2)]


def test_stopped_between_fence_and_acknowledgement(
    session: Callable[..., StoppingPod], later: Callable[..., Any]
) -> None:
    """What it then acknowledges is in the history that its successor has read; its next word is that it is fenced."""
    old = session(1)
    wire = wired(old)
    old.stop_at("journal", "epochs")
    call = later(wire.optim_step, 1)
    old.await_stopped()
    new = session(2)
    old.let_go()
    request = call.result().json()["request_id"]
    assert at(new, wire).retrieve(request).status_code == 200
    assert records(new, "accept", wire.model) == [(0, 1), (1, 1)]
    assert records(new, "result", wire.model) == [(0, 1), (1, 2)]
    try:
        assert wire.optim_step(2).status_code == MISDIRECTED
    except httpx.TransportError:
        pass  # it noticed by itself, with the result that it could not journal
    assert old.exit_code() == exitcodes.FENCED


def test_stopped_before_a_manifest(session: Callable[..., StoppingPod]) -> None:
    """It writes the manifest after all: the checkpoint is the successor's, for this and every later incarnation."""
    old = session(1)
    wire = wired(old)
    step(wire, 1)
    old.stop_at("create", "checkpoints/.*manifest.json")
    request = wire.post("save_weights", {"model_id": wire.model, "seq_id": 3, "path": "mine"}).json()["request_id"]
    old.await_stopped()
    new = session(2)
    assert at(new, wire).retrieve(request).status_code == 200
    old.let_go()
    assert old.exit_code() == exitcodes.FENCED
    directory = new.root / "models" / storage_id(wire.model) / "checkpoints/weights"
    assert sorted(path.parent.name for path in directory.glob("*/manifest.json")) == ["1-3", "2-3"]
    third = session(3)
    for pod in (new, third):
        (stored,) = (record["stored"] for record in pod.journal() if record.get("stored"))
        assert stored["key"] == "2-3"
    (listed,) = third.get("/api/v1/checkpoints").json()["checkpoints"]
    assert listed["checkpoint_id"] == "weights/mine"


def test_stopped_before_a_deletion(session: Callable[..., StoppingPod]) -> None:
    """It deletes what it had looked at before it was superseded, and nothing that is needed or newer."""
    old = session(1)
    wire = wired(old)
    old.stop_at("delete", "snapshots")
    for number in (1, 2):
        step(wire, number)
        eventually(lambda: len(list(old.root.glob("models/*/snapshots/*/manifest.json"))) == number, "its snapshot")  # noqa: B023
    with ThreadPoolExecutor(1) as pool:
        third_step = pool.submit(step, wire, 3)
        old.await_stopped()
        new = session(2)
        step(at(new, wire), 4)
        old.let_go()
        try:
            third_step.result()
        except (AssertionError, httpx.TransportError, KeyError):
            pass  # its poll may have been open: it ends with the zombie
    try:
        assert wire.optim_step(9).status_code == MISDIRECTED
    except httpx.TransportError:
        pass  # gone by itself
    assert old.exit_code() == exitcodes.FENCED
    last = session(3)
    status = last.wait_until("Serving")
    assert status["recoveries"][0]["replayedOperations"] == 0
    assert status["models"][0]["step"] == 4


@pytest.mark.parametrize(("moment", "pattern"), [("body", "journal"), ("other", "epochs")])
def test_stopped_before_a_delivery(
    session: Callable[..., StoppingPod], later: Callable[..., Any], moment: str, pattern: str
) -> None:
    """Before it has read the fence, it delivers nothing; after that, what its successor delivers too."""
    old = session(1)
    wire = wired(old)
    step(wire, 1)
    old.stop_at(moment, pattern)
    call = later(wire.retrieve, f"{wire.model}:1")
    old.await_stopped()
    new = session(2)
    old.let_go()
    delivered = at(new, wire).retrieve(f"{wire.model}:1")
    assert delivered.status_code == 200
    if moment == "body":
        assert call.result().status_code == MISDIRECTED
    else:
        assert call.result().content == delivered.content
        assert wire.retrieve(f"{wire.model}:1").status_code == MISDIRECTED
    assert old.exit_code() == exitcodes.FENCED


def test_a_chain_of_three(session: Callable[..., StoppingPod], later: Callable[..., Any]) -> None:
    """Two zombies, one of them the other's successor, let go together: the third has what both had flushed, once."""
    first = session(1)
    wire = wired(first)
    calls, pods = [], [first]
    for number in (1, 2):
        assert at(pods[-1], wire).retrieve(f"{wire.model}:{number - 1}").status_code == 200, "what it took over is done"
        pods[-1].stop_at("flushed", "journal")
        calls.append(later(at(pods[-1], wire).optim_step, number))
        pods[-1].await_stopped()
        pods.append(session(number + 1))
    for zombie in pods[:2]:
        zombie.let_go()
    assert [call.result().status_code for call in calls] == [MISDIRECTED] * 2
    assert [zombie.exit_code() for zombie in pods[:2]] == [exitcodes.FENCED] * 2
    assert at(pods[2], wire).retrieve(f"{wire.model}:2").status_code == 200
    assert records(pods[2], "accept", wire.model) == [(0, 1), (1, 1), (2, 2)]
    assert [number for number, _ in records(pods[2], "result", wire.model)] == [0, 1, 2]


def test_restarted_in_place_while_the_old_process_lives(
    session: Callable[..., StoppingPod], later: Callable[..., Any]
) -> None:
    """Same attempt and pod UID: the next boot owns the storage, and the process before it ends as any zombie."""
    old = session(1)
    wire = wired(old)
    old.stop_at("flushed", "journal")
    call = later(wire.optim_step, 1)
    old.await_stopped()
    new = session(1)
    old.let_go()
    assert call.result().status_code == MISDIRECTED
    assert old.exit_code() == exitcodes.FENCED
    incarnation = new.wait_until("Serving")["incarnation"]
    assert (incarnation["attempt"], incarnation["boot"], incarnation["number"]) == (1, 2, 2)
    assert at(new, wire).retrieve(f"{wire.model}:1").status_code == 200


def test_a_session_made_again_on_its_storage(session: Callable[..., StoppingPod]) -> None:
    """Its attempts count from 1 again, as after a lost status: it is told what the storage has seen, then adopts it."""
    old = session(5)
    wire = wired(old)
    lineage = old.wait_until("Serving")["lineage"]
    old.end()
    for late in (session(1, "uid-new", state=""), session(4, "uid-4", state="")):
        assert late.exit_code() == exitcodes.FENCED
        assert "attempt 5" in late.last_words
    assert len(list((old.root / "epochs").iterdir())) == 1, "who is refused leaves nothing"
    other = session(6, "uid-6", state="", revision="r2")
    assert other.exit_code() == exitcodes.STORAGE_MISMATCH
    assert "revision 'r1'" in other.last_words
    adopted = session(6, "uid-6")
    assert adopted.wait_until("Serving")["lineage"] == lineage
    assert at(adopted, wire).retrieve(f"{wire.model}:0").status_code == 200


def test_a_gateway_that_still_routes_to_the_zombie(session: Callable[..., StoppingPod]) -> None:
    """Its open poll ends with the zombie, is sent again while there is nobody, and is answered by the successor."""
    old = session(1, fence_interval="0.2")
    wire = wired(old)
    assert wire.optim_step(2).status_code == 200  # number 1 is missing: this one waits
    with serving(old, new_address(), {}) as stub, ThreadPoolExecutor(1) as pool:
        asked = {"request_id": f"{wire.model}:2"}
        sent = threading.Event()

        async def note(_: httpx.Request) -> None:
            sent.set()

        stub.client.event_hooks["request"].append(note)
        poll = pool.submit(wire.client.post, f"{stub.url}/api/v1/retrieve_future", json=asked)
        assert sent.wait(20)
        new = session(2)
        assert old.exit_code() == exitcodes.FENCED
        eventually(lambda: any(status == MISDIRECTED for _, status, _ in stub.submits), "the poll was refused", 20)
        stub.pod = new
        assert at(new, wire).optim_step(1).status_code == 200
        assert poll.result().json()["type"] == "optim_step"
