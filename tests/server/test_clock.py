"""A wall clock that jumps by days and years under a real pod: it is shown, and nothing goes by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everloop_trainer.session.records import Accept, Autosaved
from tests.networks import new_address
from tests.server.pod import Pod, eventually, kill_process
from tests.server.sdk import SdkProgram
from tests.server.stub import serving
from tests.server.test_survival import adapter, assert_equal_states, history, model_of
from tests.server.wire import Wire, texts
from tests.wall_clock import WallClock

LOOP = {"seed": 17, "sequences": 4, "length": 24}
JUMPS = (3.0, -40.0, 4000.0, -400.0, -3.0)
"""Days away from the true time, one after another."""


def autosaved(pod: Pod) -> int:
    """How many automatic checkpoints there have been."""
    return sum(isinstance(record, Autosaved) for record in history(pod))


def test_a_clock_that_jumps_changes_nothing(make_pod: Callable[..., Pod], tmp_path: Path) -> None:
    """Server, spare and engines see each jump, one server starts in the past: loop and adapter are the same.

    Automatic checkpoints go on coming, and a number that has not arrived yet is not given up.
    """
    clock, pod = WallClock(tmp_path), make_pod()
    pod.environment |= clock.environment
    pod.configure(checkpoints={"everySeconds": 0.2, "keepLast": 1})
    pod.start()
    pod.wait_until("Serving")
    enough, other = tmp_path / "enough", Wire(pod)
    with other.client, serving(pod, new_address(), {}) as stub:
        waiting = other.created().optim_step(2).json()["request_id"]
        with SdkProgram(stub.url, "train", steps=10_000, until=str(enough), **LOOP) as program:
            model = model_of(program)
            for days in JUMPS:
                clock.jump(days)
                if days == JUMPS[-1]:
                    kill_process(eventually(lambda: pod.child("server"), "a server"))
                    eventually(pod.status, "another server")
                steps, saves = len(program.named("step")), autosaved(pod)
                eventually(lambda: len(program.named("step")) > steps + 1, f"steps at {days} days", 90)  # noqa: B023
                eventually(lambda: autosaved(pod) > saves + 1, f"checkpoints at {days} days", 30, 0.1)  # noqa: B023
            enough.touch()
            program.finish()
        late = other.retrieve(other.forward_backward(1, texts(1, 2, 16)).json()["request_id"])
        assert late.headers["content-type"] == "application/x-protobuf", f"given up too early: {late.text}"
        assert "error" not in other.retrieve(waiting).json()
        with SdkProgram(stub.url, "train", steps=len(program.named("step")), **LOOP) as steady:
            steady.finish()
    assert_equal_states(adapter(pod, model), adapter(pod, model_of(steady)))
    assert program.named("step") == steady.named("step")
    accepted = [record.time for record in history(pod) if isinstance(record, Accept) and record.stream == model]
    years = {int(time[:4]) for time in accepted}
    assert max(years) - min(years) >= 11, "the clock has jumped"
    status = pod.wait_until("Serving")
    assert status["incarnation"]["boot"] == 2
    assert (status["storage"]["error"], status["replayMismatches"]) == ("", 0)
