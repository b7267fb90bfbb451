"""How an RLJob ends, and rests: tables over plain values."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core.jobs.observed import Driver
from everloop_operator.core.observed import Answer, Container
from tests.operator.builders import NOW
from tests.operator.job_builders import (
    TEMPLATE,
    after,
    condition,
    decided,
    driver,
    failed,
    job,
    observed,
    running,
    seen,
    spec,
    status_of,
    told,
    variables,
    waiting,
)

SUCCEEDED = driver(phase="Succeeded", ready=False, container=Container(exit_code=0, exit_reason="Completed"))


@pytest.mark.parametrize(
    ("changes", "drivers", "progress", "reason"),
    [
        ({}, (SUCCEEDED,), told(3), "Succeeded"),
        ({}, (driver(),), told(3, done=True), "Succeeded"),
        ({}, (failed(code=134),), told(3, done=True), "Succeeded"),
        ({}, (failed(code=139, failure="Evicted: the node was low on memory"),), told(3, done=True), "Succeeded"),
        ({"limits": {"maxIterations": 3}}, (driver(),), told(3, done=True), "Succeeded"),
        ({"goal": {"metric": "reward", "value": "1"}}, (driver(),), told(3, done=True, goalReached=3), "GoalReached"),
        ({"goal": {"metric": "reward", "value": "1"}}, (driver(),), told(3, goalReached=3), "GoalReached"),
        ({"goal": {"metric": "reward", "value": "1"}}, (SUCCEEDED,), told(3, goalReached=3), "GoalReached"),
        ({"goal": {"metric": "reward", "value": "1"}}, (failed(),), told(3, goalReached=3), "GoalReached"),
        ({"limits": {"maxIterations": 3}}, (driver(),), told(3), "LimitReached"),
        ({"limits": {"maxIterations": 3}}, (SUCCEEDED,), told(3), "Succeeded"),
        ({"limits": {"maxIterations": 3}}, (failed(),), told(3), "LimitReached"),
        ({"limits": {"activeSeconds": 100}}, (driver(),), told(3), "LimitReached"),
    ],
)
def test_completion(changes: dict[str, Any], drivers: tuple[Driver, ...], progress: Any, reason: str) -> None:
    """First the status says so; then drivers are ended, and then the key; after the TTL all children go."""
    base = replace(running(), drivers=drivers, progress=Answer(report=progress))
    base = replace(base, job=replace(base.job, spec=spec(**changes)))
    result = decided(base)
    status = status_of(result)
    assert (status.phase, condition(result, "Complete")[:2]) == ("Completed", ("True", reason))
    assert condition(result, "Ready")[0] == "True"
    assert (result.delete_pods, result.create_pod, result.keep_key) == ((), None, True)
    assert [event.reason for event in result.events] == ["Completed"]
    end = after(base, result)
    cleaning = decided(end)
    assert [d.name for d in cleaning.delete_pods] == ([] if drivers[0].pod.terminal else ["poems-driver-a1"])
    assert (cleaning.credentials, cleaning.keep_key, cleaning.poll) == (None, not drivers[0].pod.terminal, None)
    assert not decided(replace(end, drivers=())).keep_key
    assert cleaning.status == status
    expired = decided(replace(end, now=NOW + timedelta(seconds=spec().ttl_seconds_after_finished + 1)))
    assert [d.name for d in expired.delete_pods] == ["poems-driver-a1"]


@pytest.mark.parametrize(
    ("changes", "progress"),
    [
        ({"goal": {"metric": "reward", "value": "1"}}, Answer()),
        ({"goal": {"metric": "reward", "value": "1"}}, Answer(report=told(3))),
        ({}, Answer(report=told(3, goalReached=3))),
        ({"limits": {"maxIterations": 3}}, Answer()),
        ({"limits": {"maxIterations": 3}}, Answer(report=told(2))),
        ({"limits": {"activeSeconds": 101}}, Answer(report=told(3))),
        ({}, Answer(report=told(3, done=False))),
    ],
)
def test_job_that_is_not_done_goes_on(changes: dict[str, Any], progress: Any) -> None:
    """While nothing is known, while less is reached than was asked for, and where nothing is asked for any more."""
    base = running(iteration=1)
    result = decided(replace(base, job=replace(base.job, spec=spec(**changes)), progress=progress))
    assert (status_of(result).phase, status_of(result).finish_time, result.delete_pods) == ("Running", None, ())


@pytest.mark.parametrize("code", [134, 139])
def test_crash_of_a_driver_that_is_not_done_is_a_failure(code: int) -> None:
    """It is replaced at the cost of the application budget, and the remedy says how a program ends well."""
    status = status_of(decided(replace(running(), drivers=(failed(code=code),))))
    assert (status.attempt, status.phase) == (2, "Recovering")
    assert status.failure is not None
    assert "os._exit(0)" in status.failure.remedy


def test_own_session_goes_with_the_ttl_and_a_named_one_stays() -> None:
    """`ttlSecondsAfterFinished` removes what the job owns."""
    finished = RLJobStatus(phase="Completed", attempt=1, finish_time="2026-05-01T11:00:00Z")
    own = observed(job=job(finished, ttlSecondsAfterFinished=60, **TEMPLATE), session=seen(owner="uid-job"))
    assert decided(own).delete_session == "uid-session"
    named = observed(job=job(finished, ttlSecondsAfterFinished=60))
    assert decided(named).delete_session == ""
    early = observed(job=job(finished, ttlSecondsAfterFinished=7200, **TEMPLATE), session=seen(owner="uid-job"))
    assert (decided(early).delete_session, decided(early).requeue_after) == ("", 3600.0)


@pytest.mark.parametrize(
    ("status", "suspend", "suspended", "applied"),
    [
        (RLJobStatus(), False, False, None),
        (RLJobStatus(), True, False, True),
        (RLJobStatus(), True, True, None),
        (RLJobStatus(phase="Suspended"), False, True, False),
        (RLJobStatus(phase="Completed", finish_time="2026-05-01T11:59:00Z"), False, False, True),
        (RLJobStatus(phase="Completed", finish_time="2026-05-01T11:59:00Z"), False, True, None),
    ],
)
def test_own_session_rests_with_the_job(status: RLJobStatus, suspend: bool, suspended: bool, applied: Any) -> None:
    """It holds its GPUs only while the job is at work; nothing is written where it is so already."""
    own = replace(seen(owner="uid-job"), suspended=suspended)
    result = decided(observed(job=job(status, suspend=suspend, **TEMPLATE), session=own))
    assert (result.apply_session and result.apply_session["spec"]["suspend"]) == applied
    for other in (observed(job=job(status, suspend=suspend), session=seen()),):
        assert decided(other).apply_session is None


def test_finished_job_stays_finished() -> None:
    """Neither a raised limit nor a new image starts it again."""
    finished = RLJobStatus(phase="Completed", attempt=1, finish_time="2026-05-01T11:59:00Z")
    changed = observed(job=replace(job(finished, limits={"maxIterations": 900}), generation=2))
    result = decided(changed)
    assert result.create_pod is None
    assert status_of(result).observed_generation == 2


# --- rest -----------------------------------------------------------------------------------------------------------


def test_suspended_job_has_no_driver_and_goes_on_where_it_was() -> None:
    """Its driver is ended and its key void; resumed, the next driver costs no budget."""
    base = running(iteration=5)
    rest = replace(base, job=replace(base.job, spec=spec(suspend=True)))
    result = decided(rest)
    assert (status_of(result).phase, condition(result, "Ready")[:2]) == ("Suspended", ("True", "Suspended"))
    assert [d.name for d in result.delete_pods] == ["poems-driver-a1"]
    assert (result.credentials, result.keep_key) == (None, True), "until it is gone it may save what it has"
    resting = after(rest, result, drivers=())
    assert decided(resting).status == resting.job.status
    assert not decided(resting).keep_key
    resumed = replace(resting, job=replace(resting.job, spec=spec()))
    waits = replace(resumed, session=waiting())
    assert decided(waits).create_pod is None
    for _ in range(2):  # the session was suspended too, and takes its time
        waits = after(waits, decided(waits))
    result = decided(replace(waits, session=resumed.session))
    assert variables(result)["EVERLOOP_RESUME_ITERATION"] == "5"
    status = status_of(result)
    assert (status.attempt, status.recoveries[-1].reason) == (2, "Resumed")
    assert status.budgets is not None
    assert status.budgets.infrastructure.used == 0


def test_rest_does_not_count_as_active_time() -> None:
    """Only what lies before and after it uses up `activeSeconds`."""
    base = running(limits={"activeSeconds": 150})
    rest = replace(base, job=replace(base.job, spec=spec(suspend=True, limits={"activeSeconds": 150})))
    status = status_of(decided(rest))
    assert (status.active_seconds, status.active_since) == (100, None)
    resumed = after(rest, decided(rest), drivers=(), now=NOW + timedelta(days=1))
    resumed = replace(resumed, job=replace(resumed.job, spec=base.job.spec))
    result = decided(resumed)
    assert result.create_pod is not None
    going = after(resumed, result, drivers=(driver(2),))
    assert decided(going).requeue_after == pytest.approx(50)
    late = decided(replace(going, now=going.now + timedelta(seconds=50)))
    assert condition(late, "Complete")[:2] == ("True", "LimitReached")
