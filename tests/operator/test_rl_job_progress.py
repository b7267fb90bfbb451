"""A driver that reports nothing new, and what the status says of its model: tables over plain values."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.core.jobs.observed import ObservedJob, SeenSession, heard
from everloop_operator.core.observed import Answer, Container
from everloop_operator.core.projections import container_of, format_time
from everloop_operator.core.refusals import Refusal
from tests.operator.builders import NOW, ago
from tests.operator.job_builders import (
    PATH,
    after,
    condition,
    decided,
    driver,
    failed,
    idle,
    job,
    observed,
    report,
    running,
    seen,
    spec,
    status_of,
    told,
    waiting,
)

LIMIT = 60
DEADLINE: dict[str, Any] = {"deadlines": {"progressSeconds": LIMIT}}


def served(seconds: float, status: str = "True") -> SeenSession:
    """A session that has served, or has not served, for so long."""
    serving = seen()
    before = serving.session.status
    listed = [
        item.model_copy(update={"last_transition_time": format_time(ago(seconds)), "status": status})
        if item.type == names.CONDITION_SERVING
        else item
        for item in before.conditions
    ]
    changed = before.model_copy(update={"conditions": listed})
    return replace(serving, session=replace(serving.session, status=changed))


def quiet(silent: float = 90, ran: float = 90, session: SeenSession | None = None, **changes: Any) -> ObservedJob:
    """A job whose driver has run for so long, and has said the same for so long; `changes` are of its spec."""
    base = running(iteration=3, **{**DEADLINE, **changes})
    container = Container(running=True, started=ago(ran))
    return replace(
        base,
        drivers=(driver(container=container),),
        session=served(90) if session is None else session,
        progress=Answer(report=told(3), idle_since=ago(silent)),
    )


@pytest.mark.parametrize(
    ("observation", "lost"),
    [
        (quiet(), True),
        (quiet(silent=LIMIT), True),
        (quiet(silent=LIMIT - 1), False),
        (quiet(ran=LIMIT - 1), False),
        (quiet(session=served(LIMIT - 1)), False),
        (quiet(session=waiting()), False),
        (quiet(session=served(90, "False")), False),
        (quiet(session=idle()), True),
        (quiet(session=idle(), silent=LIMIT - 1), False),
        (quiet(session=idle("Refuse")), False),
        (replace(quiet(), session=None), False),
        (quiet(deadlines={}), False),
        (replace(quiet(), progress=Answer(report=told(3))), False),
        (replace(quiet(), progress=replace(quiet().progress, unreachable_since=ago(1))), False),
        (replace(quiet(), drivers=(driver(ready=False, phase="Pending"),)), False),
        (replace(quiet(), progress=replace(quiet().progress, report=told(3, done=True))), False),
        (replace(quiet(), progress=replace(quiet().progress, report=told(3, goalReached=3)),
                 job=replace(quiet().job, spec=spec(goal={"metric": "reward", "value": "1"}, **DEADLINE))), False),
    ],
)  # fmt: skip
def test_silent_driver_is_replaced(observation: ObservedJob, lost: bool) -> None:
    """Only time counts in which it ran, its session served and its reader answered."""
    result = decided(observation)
    assert (result.create_pod is not None) == lost
    status = status_of(result)
    if not lost:
        assert status.loss is None
    else:
        assert status.budgets is not None
        assert (status.recoveries[-1].reason, status.budgets.application.used) == ("NoProgress", 1)
        assert status.failure is not None
        assert (status.failure.reason, status.failure.exit_code) == ("NoProgress", None)
        assert "spec.deadlines.progressSeconds" in status.failure.remedy


def test_deadline_is_looked_at_in_time() -> None:
    """The pass comes back when it is reached, if nothing wakes it before."""
    assert decided(quiet(silent=LIMIT - 20)).requeue_after == pytest.approx(20)
    assert decided(quiet(session=served(LIMIT - 7))).requeue_after == pytest.approx(7)


def test_silent_driver_is_ended_by_its_successor() -> None:
    """Its pod goes once the next one is there; the next one has the whole time."""
    base = quiet()
    successor = driver(2, container=Container(running=True, started=NOW))
    result = decided(after(base, decided(base), drivers=(*base.drivers, successor), progress=Answer()))
    assert [deletion.name for deletion in result.delete_pods] == ["poems-driver-a1"]
    assert result.create_pod is None


def test_silent_driver_stays_lost_while_its_successor_is_refused() -> None:
    """It is asked no more then, so that nothing says how long it has been silent."""
    base = replace(quiet(), refusal=Refusal("quota exceeded", NOW, generation=1))
    result = decided(base)
    assert (result.create_pod, result.poll) == (None, None)
    assert "nothing new" in condition(result, "Ready")[2] or "quota exceeded" in condition(result, "Ready")[2]
    later = after(base, result, progress=Answer(), refusal=None)
    status = status_of(decided(later))
    assert (status.attempt, status.recoveries[-1].reason) == (2, "NoProgress")


def test_silence_ends_the_job_once_its_budget_is_used_up() -> None:
    """Failed for good, with the field to raise."""
    result = decided(quiet(recovery={"application": {"maxAttempts": 0}}))
    assert (status_of(result).phase, condition(result, "Stalled")[1]) == ("Failed", "NoProgress")
    assert "spec.deadlines.progressSeconds" in condition(result, "Ready")[2]


def test_failure_of_a_silent_driver_is_told_as_what_it_is() -> None:
    """A program that ended is no longer one that is silent."""
    base = quiet()
    status = status_of(decided(replace(base, drivers=(failed(code=3),))))
    assert status.recoveries[-1].reason == "DriverFailed"


def test_silence_is_counted_from_the_last_news() -> None:
    """The same report again is no news; another one is."""
    first = heard(Answer(), told(3), NOW)
    assert first.idle_since == NOW
    later = NOW + timedelta(seconds=30)
    same = heard(replace(first, unreachable_since=NOW, problem="ReadTimeout"), told(3), later)
    assert same == first
    assert heard(first, told(4), later).idle_since == later


def test_start_of_a_container_is_that_of_its_run() -> None:
    """As its kubelet tells; none while it waits or has ended."""
    running_one = {"name": "driver", "state": {"running": {"startedAt": "2026-05-01T11:00:00Z"}}}
    ended = {"name": "driver", "state": {"terminated": {"startedAt": "2026-05-01T11:00:00Z", "exitCode": 1}}}
    assert container_of({"containerStatuses": [running_one]}, "driver").started == datetime.fromisoformat(
        "2026-05-01T11:00:00Z"
    )
    assert container_of({"containerStatuses": [ended]}, "driver").started is None


def test_model_is_the_one_of_the_latest_checkpoint() -> None:
    """None before the job has saved one, though it started from somebody's; kept while the reader is silent."""
    base = running(iteration=3)
    assert base.job.status.session is not None
    assert base.job.status.session.model == "s-1:train:0"
    silent = status_of(decided(replace(base, progress=Answer())))
    assert silent.session == base.job.status.session
    started = observed(
        job=job(start={"checkpoint": {"uri": f"{PATH}9"}}),
        drivers=(driver(),),
        progress=Answer(report=report(resume={"iteration": 0, "checkpoint": f"{PATH}9"})),
    )
    fresh = status_of(decided(started)).session
    assert fresh is not None
    assert fresh.model == ""
