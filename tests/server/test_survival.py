"""The promise in one pod: kill any of its processes in the middle of an operation, and the user's loop sees nothing.

The loop is the unmodified SDK in a process of its own. Each kill is aimed by reading the journal, which proves
afterwards where it fell.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.records import Record, Result, Try
from everloop_trainer.store.epochs import newest_epoch
from everloop_trainer.store.files import PosixFiles
from everloop_trainer.store.sealed import records, seal
from tests.server.pod import Pod, alive, eventually, kill_process, process_of
from tests.server.sdk import SdkProgram
from tests.server.stub import Stub

STEPS = 8
LOOP = {"seed": 17, "steps": STEPS, "sequences": 96, "length": 120}
Journal = list[dict[str, Any]]


@dataclass(frozen=True)
class Shot:
    """A kill that fell while operation `seq` of `model` ran, in engine `engine`, with this status just before."""

    model: str
    seq: int
    engine: int
    status: dict[str, Any]
    at: float


def history(pod: Pod) -> list[Record]:
    """The journal as it is on disk now, read in this process: fast enough to aim by."""
    files = PosixFiles(pod.root)
    newest = newest_epoch(files)
    assert newest is not None
    return [found.record for found in records(files, seal(files, newest.number))]


def running(pod: Pod, model: str) -> tuple[int, int] | None:
    """Number and engine of the forward_backward of `model` that was tried and has no result."""
    found: tuple[int, int] | None = None
    for record in history(pod):
        if isinstance(record, Try) and record.stream == model:
            found = record.seq, record.engine
        elif isinstance(record, Result) and record.stream == model:
            found = None
    return found if found is not None and found[0] % 2 == 1 else None


def model_of(program: SdkProgram) -> str:
    """The model that a program trains, once it was created."""
    return str(eventually(lambda: program.named("created"), "the model exists", 60)[0]["model_id"])


def held(pod: Pod, model: str) -> tuple[int, int] | None:
    """Like `running`, with the engine stopped, so that the operation cannot end before the kill."""
    found = running(pod, model)
    if found is None:
        return None
    os.kill(found[1], signal.SIGSTOP)
    time.sleep(0.05)  # an answer may have been on its way
    if running(pod, model) == found:
        return found
    os.kill(found[1], signal.SIGCONT)
    return None


def shoot(pod: Pod, program: SdkProgram, after_step: int, victim: Callable[[Pod, int], int]) -> Shot:
    """Kills a process of the pod while a forward_backward runs, at the earliest after `after_step` steps."""
    model = model_of(program)
    eventually(lambda: len(program.named("step")) >= after_step, f"{after_step} steps", 60)
    status = pod.status()
    assert status is not None
    seq, engine = eventually(lambda: held(pod, model), "an operation runs", 30, every=0.002)
    target = victim(pod, engine)
    kill_process(target)
    at = time.monotonic()
    if target != engine:
        os.kill(engine, signal.SIGCONT)
    return Shot(model, seq, engine, status, at)


def assert_hit(pod: Pod, shot: Shot, fields: dict[str, Any]) -> None:
    """The operation was accepted and tried before the kill, and its one result came after another try."""
    journal = pod.journal()
    of_operation = [record for record in journal if record.get("s") == shot.model and record["n"] == shot.seq]
    kinds = [record["t"] for record in of_operation]
    assert kinds == ["accept", "try", "try", "result"], kinds
    first, second = (record for record in of_operation if record["t"] == "try")
    assert first["engine"] == shot.engine != second["engine"] or first["incarnation"] != second["incarnation"]
    for name, expected in fields.items():
        assert (first[name] == second[name]) is expected, name


def assert_each_once(pod: Pod, model: str) -> None:
    """Every operation of the model was accepted once and has one result, in order."""
    journal = [record for record in pod.journal() if record.get("s") == model]
    results = [record["n"] for record in journal if record["t"] == "result"]
    assert results == list(range(2 * STEPS + 2))
    assert sorted(record["n"] for record in journal if record["t"] == "accept") == results


def adapter(pod: Pod, model: str) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of the model's last checkpoint."""
    directory = pod.root / "models" / storage_id(model) / "checkpoints" / "weights"
    newest = max(directory.iterdir(), key=lambda path: int(path.name.partition("-")[2].partition(".")[0]))
    tensors: dict[str, np.ndarray[Any, Any]] = load_file(newest / "state.safetensors")
    return tensors


def assert_equal_states(found: dict[str, np.ndarray[Any, Any]], expected: dict[str, np.ndarray[Any, Any]]) -> None:
    """Adapter and optimizer state are the same bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tobytes() == tensor.tobytes(), name
    moved = [np.abs(tensor).max() for name, tensor in found.items() if "lora_B" in name and name.startswith("weights/")]
    assert min(moved) > 1e-3, "the adapter is where it began"


@pytest.fixture(scope="module")
def unbroken(own_pod: Pod, gateway: Stub) -> dict[str, np.ndarray[Any, Any]]:
    """The state at the end of the loop when nothing is killed."""
    with SdkProgram(gateway.url, "train", **LOOP) as program:
        program.finish()
    return adapter(own_pod, model_of(program))


def finish(pod: Pod, program: SdkProgram, unbroken: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """The program ends without an exception and its state is that of the unbroken run."""
    program.finish()
    model = model_of(program)
    assert [event["step"] for event in program.named("step")] == list(range(STEPS))
    assert_each_once(pod, model)
    assert_equal_states(adapter(pod, model), unbroken)
    status = pod.status()
    assert status is not None
    assert status["replayMismatches"] == 0
    return status


def test_engine_killed(own_pod: Pod, gateway: Stub, unbroken: dict[str, np.ndarray[Any, Any]]) -> None:
    """SIGKILL of the engine in a forward_backward."""
    with SdkProgram(gateway.url, "train", **LOOP) as program:
        shot = shoot(own_pod, program, 2, lambda _pod, engine: engine)
        status = finish(own_pod, program, unbroken)
    assert_hit(own_pod, shot, {"incarnation": True, "engine": False})
    assert status["engine"]["restarts"] == shot.status["engine"]["restarts"] + 1
    assert status["recoveries"][-1]["reason"] == "EngineLost"
    assert status["recoveries"][-1]["lostOperations"] == 0
    print("recovery_seconds", status["recoveries"][-1]["seconds"])


def opened(pod: Pod) -> dict[str, Any] | None:
    """The status of a server that has taken over the storage."""
    status = pod.status()
    return status if status is not None and "incarnation" in status else None


def test_server_killed(own_pod: Pod, gateway: Stub, unbroken: dict[str, np.ndarray[Any, Any]]) -> None:
    """SIGKILL of the server in a forward_backward: the engine follows it, a new server claims boot + 1."""
    with SdkProgram(gateway.url, "train", **LOOP) as program:
        shot = shoot(own_pod, program, 2, lambda pod, _engine: process_of(pod, "server"))
        eventually(lambda: not alive(shot.engine), "the engine ended with its server", 5)
        ready = eventually(lambda: opened(own_pod), "a new server", 20)
        print("server_answers_after_seconds", round(time.monotonic() - shot.at, 2))
        status = finish(own_pod, program, unbroken)
    assert_hit(own_pod, shot, {"incarnation": False, "engine": False})
    assert ready["incarnation"]["boot"] == shot.status["incarnation"]["boot"] + 1
    assert status["recoveries"][-1]["reason"] == "ServerRestarted"
    assert status["recoveries"][-1]["lostOperations"] == 0
    print("recovery_seconds", status["recoveries"][-1]["seconds"])


def test_spare_killed(own_pod: Pod, gateway: Stub, unbroken: dict[str, np.ndarray[Any, Any]]) -> None:
    """SIGKILL of the spare: its engine goes on; then of the engine too, and a new spare gives another."""
    with SdkProgram(gateway.url, "train", **LOOP) as program:
        spare = own_pod.child("spare")
        assert spare is not None
        kill_process(spare)
        shot = shoot(own_pod, program, 2, lambda _pod, engine: engine)
        assert shot.status["engine"]["pid"] == shot.engine
        status = finish(own_pod, program, unbroken)
    assert_hit(own_pod, shot, {"incarnation": True, "engine": False})
    assert own_pod.child("spare") not in (None, spare)
    print("recovery_seconds", status["recoveries"][-1]["seconds"])


def test_container_killed(own_pod: Pod, gateway: Stub, unbroken: dict[str, np.ndarray[Any, Any]]) -> None:
    """SIGKILL of process 1, and the restart in place that the kubelet makes of it."""
    with SdkProgram(gateway.url, "train", **LOOP) as program:
        tree: list[int] = []

        def container(pod: Pod, _engine: int) -> int:
            tree.extend(pod.processes())
            return pod.container.pid

        shot = shoot(own_pod, program, 2, container)
        eventually(lambda: not any(alive(pid) for pid in tree), "every process of the pod ended", 10)
        own_pod.container.wait()
        own_pod.start()
        status = finish(own_pod, program, unbroken)
    assert_hit(own_pod, shot, {"incarnation": False, "engine": False})
    assert status["recoveries"][-1]["reason"] == "ServerRestarted"
    print("recovery_seconds", status["recoveries"][-1]["seconds"])


def test_pod_stopped_and_replaced(
    own_pod: Pod, gateway: Stub, unbroken: dict[str, np.ndarray[Any, Any]], make_pod: Callable[..., Pod]
) -> None:
    """SIGTERM snapshots every model, so that the pod of the next attempt replays nothing that had ended."""
    with SdkProgram(gateway.url, "train", **LOOP) as program:
        model = model_of(program)
        eventually(lambda: len(program.named("step")) >= 2, "two steps", 60)
        assert own_pod.stop() == 0
        ended = [record for record in history(own_pod) if isinstance(record, Result) and record.stream == model]
        other = make_pod(attempt=2, uid="uid-2")
        other.use_storage_of(own_pod)
        other.start()
        gateway.pod = other
        status = finish(other, program, unbroken)
    (recovery,) = status["recoveries"]
    assert recovery["reason"] == "PodReplaced"
    assert recovery["replayedOperations"] == 0
    assert f"{storage_id(model)}:{ended[-1].seq}" in recovery["resumedFrom"].split(",")
    print("recovery_seconds", recovery["seconds"])
