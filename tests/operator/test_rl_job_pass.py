"""What a pass does beside the driver: questions, the next look, the key, old secrets and the session."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core.jobs.health import UNREACHABLE_PATIENCE_SECONDS
from everloop_operator.core.jobs.plan import FORCE_DELETE_SECONDS
from everloop_operator.core.observed import Answer
from everloop_operator.core.refusals import Refusal
from tests.operator.builders import NOW, ago
from tests.operator.job_builders import (
    TEMPLATE,
    after,
    decided,
    driver,
    failed,
    job,
    observed,
    running,
    seen,
    spec,
    told,
    waiting,
)

# --- questions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ready", "every"), [(True, 3.0), (False, 1.0)])
def test_reader_of_a_driver_is_asked(ready: bool, every: float) -> None:
    """More often while it is waited for, and with the goal."""
    goal = {"metric": "reward", "value": "1"}
    base = running(attempt=2, goal=goal)
    poll = decided(replace(base, drivers=(driver(2, ready=ready),))).poll
    assert poll is not None
    assert (poll.ip, poll.pod_uid, poll.attempt, poll.every_seconds) == ("127.0.0.9", "uid-driver-2", 2, every)
    assert poll.goal == spec(goal=goal).goal


@pytest.mark.parametrize(
    "changes",
    [
        {"drivers": (driver(ip=""),)},
        {"drivers": ()},
        {"drivers": (failed(),), "session": waiting()},
        {"drivers": (driver(deletion_requested=ago(1)),), "session": waiting()},
    ],
)
def test_nobody_is_asked_who_cannot_answer_for_the_attempt(changes: dict[str, Any]) -> None:
    """No address yet, no pod, a program that has ended, an attempt that is over."""
    assert decided(replace(running(), **changes)).poll is None


def test_a_driver_that_has_ended_is_not_asked() -> None:
    """Its reader ends with it, and its last words count."""
    base = running(recovery={"infrastructure": {"maxAttempts": 0}})
    assert decided(replace(base, drivers=(driver(phase="Failed", failure="Evicted: full"),))).poll is None


# --- the next look --------------------------------------------------------------------------------------------------


def test_refusal_is_tried_again_in_time() -> None:
    """The API server sends no signal when a quota has room."""
    assert decided(observed(refusal=Refusal("quota", ago(10), generation=1))).requeue_after == pytest.approx(20)


def test_silence_of_a_reader_is_told_in_time() -> None:
    """Once it has lasted."""
    silent = Answer(report=told(3), unreachable_since=ago(5), problem="ReadTimeout")
    wait = decided(replace(running(), progress=silent)).requeue_after
    assert wait == pytest.approx(UNREACHABLE_PATIENCE_SECONDS - 5)


def test_what_is_past_asks_for_no_look() -> None:
    """A pass that comes back at once, again and again, would be a hot loop."""
    base = replace(running(), refusal=Refusal("quota", ago(100), generation=1))
    assert decided(base).requeue_after is None
    second = running(attempt=2)
    stuck = driver(1, deletion_requested=ago(FORCE_DELETE_SECONDS + 100))
    assert decided(replace(second, drivers=(*second.drivers, stuck))).requeue_after is None


def test_pod_is_forced_away_when_its_time_is_over() -> None:
    """Exactly then, for that is when the next look is due."""
    base = running(attempt=2)
    stuck = driver(1, deletion_requested=ago(FORCE_DELETE_SECONDS))
    [deletion] = decided(replace(base, drivers=(*base.drivers, stuck))).delete_pods
    assert deletion.force


def test_resting_job_forces_a_pod_that_does_not_go() -> None:
    """A suspended job looks again for that alone."""
    base = running(suspend=True)
    leaving = driver(deletion_requested=ago(FORCE_DELETE_SECONDS - 7))
    assert decided(replace(base, drivers=(leaving,))).requeue_after == pytest.approx(7)
    assert decided(replace(base, drivers=())).requeue_after is None


# --- key and secrets ------------------------------------------------------------------------------------------------


def test_key_stays_while_a_successor_is_waited_for() -> None:
    """Neither renewed nor deleted: what the lost driver saves till then is not lost."""
    for drivers in ((), (driver(deletion_requested=ago(1)),)):
        result = decided(replace(running(), drivers=drivers, session=waiting()))
        assert (result.credentials, result.keep_key) == (None, True)


def test_secrets_of_attempts_without_a_pod_go() -> None:
    """A predecessor that has not gone yet may still need its own."""
    base = running(attempt=7)
    assert decided(replace(base, drivers=(*base.drivers, driver(5)))).stale_secrets == (2, 3, 4, 6)
    assert decided(replace(base, drivers=())).stale_secrets == (3, 4, 5, 6, 7), "the next attempt is 8"
    resting = decided(replace(running(attempt=2, suspend=True), drivers=(driver(1),)))
    assert resting.stale_secrets == (2,)


# --- the session ----------------------------------------------------------------------------------------------------

FINISHED = RLJobStatus(phase="Completed", attempt=1, finish_time="2026-05-01T11:00:00Z")
TTL = 600


def finished(age: float, **changes: Any) -> Any:
    """A job with a session of its own that has ended so many seconds ago."""
    ended = job(FINISHED, ttlSecondsAfterFinished=TTL, **TEMPLATE)
    now = NOW.replace(hour=11, minute=0) + timedelta(seconds=age)
    return observed(**{"now": now, "job": ended, "session": seen(owner="uid-job"), **changes})


def test_children_go_when_their_time_is_over() -> None:
    """Exactly then; the session is not suspended on its way out, and nothing more is looked at."""
    before, then = decided(finished(TTL - 1)), decided(finished(TTL, drivers=(driver(phase="Succeeded"),)))
    assert (before.delete_session, before.requeue_after) == ("", 1.0)
    assert before.apply_session is not None
    assert (then.delete_session, then.apply_session, then.requeue_after) == ("uid-session", None, None)
    assert [deletion.name for deletion in then.delete_pods] == ["poems-driver-a1"]


@pytest.mark.parametrize("session", [None, seen(owner="uid-other"), seen(owner="uid-job", deleting=True)])
def test_session_that_is_not_the_jobs_own_is_not_deleted(session: Any) -> None:
    """None, somebody else's of that name, and one that goes already."""
    assert decided(finished(TTL + 1, session=session)).delete_session == ""


@pytest.mark.parametrize(
    ("session", "changes"),
    [
        (None, {"suspend": True}),
        (seen(owner="uid-other"), {"suspend": True}),
        (seen(owner="uid-job", deleting=True), {"suspend": True}),
        (
            replace(seen(owner="uid-job"), suspended=True),
            {"session": {"template": {"spec": {**TEMPLATE["session"]["template"]["spec"], "suspend": True}}}},
        ),
    ],
)
def test_session_that_is_as_it_should_be_is_not_written(session: Any, changes: dict[str, Any]) -> None:
    """None is made in order to rest, another's or a leaving one is left alone, and a template may suspend its own."""
    assert decided(observed(job=job(**{**TEMPLATE, **changes}), session=session)).apply_session is None


def test_creation_of_a_session_is_told_once() -> None:
    """When it is made, and not of one that is only named."""
    made = decided(observed(job=job(**TEMPLATE), session=None))
    assert "SessionCreated" in [event.reason for event in made.events]
    for quiet in (
        decided(observed(session=None)),
        decided(observed(job=job(**TEMPLATE), session=replace(waiting(), owner="uid-job"))),
    ):
        assert "SessionCreated" not in [event.reason for event in quiet.events]


def test_pass_after_the_end_changes_nothing_more() -> None:
    """Neither key nor session nor status."""
    over = finished(10, session=replace(seen(owner="uid-job"), suspended=True))
    result = decided(over)
    assert (result.apply_session, result.delete_pods, result.keep_key, result.events) == (None, (), False, ())
    assert decided(after(over, result)).status == result.status
