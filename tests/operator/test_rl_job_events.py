"""The story of an RLJob as `kubectl describe` tells it: which events a pass is worth, and that none comes twice."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core.jobs.observed import ObservedJob
from everloop_operator.core.observed import Answer, Container
from tests.operator.builders import NOW, ago
from tests.operator.job_builders import (
    TEMPLATE,
    after,
    decided,
    driver,
    failed,
    idle,
    job,
    observed,
    running,
    seen,
    spec,
    told,
    waiting,
)

BASE = running()
SUSPENDED = replace(BASE, job=replace(BASE.job, spec=spec(suspend=True)))
GONE = replace(BASE, drivers=())
WITHOUT_BUDGET = running(recovery={"application": {"maxAttempts": 0}, "infrastructure": {"maxAttempts": 0}})
LONG = replace(observed(), job=job(RLJobStatus(phase="Pending")), session=seen(mode="Exclusive"))

STORIES: list[tuple[str, ObservedJob, list[tuple[str, str, str]]]] = [
    (
        "a job begins",
        observed(),
        [("Normal", "PodCreated", "created the pod of driver 1")],
    ),
    (
        "its session is made",
        observed(job=job(**TEMPLATE), session=None),
        [("Normal", "SessionCreated", "created TrainingSession poems")],
    ),
    ("its session is waited for", observed(session=waiting()), []),
    (
        "its program fails",
        replace(BASE, drivers=(failed(code=3),)),
        [
            ("Warning", "DriverFailed", "the driver in pod poems-driver-a1 ended with exit code 3"),
            ("Normal", "NewAttempt", "driver 2 takes over from driver 1 (DriverFailed)"),
            ("Normal", "PodCreated", "created the pod of driver 2"),
        ],
    ),
    (
        "its pod is lost",
        GONE,
        [
            ("Warning", "PodLost", "pod poems-driver-a1 no longer exists"),
            ("Normal", "NewAttempt", "driver 2 takes over from driver 1 (PodLost)"),
            ("Normal", "PodCreated", "created the pod of driver 2"),
        ],
    ),
    (
        "its pod is deleted",
        replace(BASE, drivers=(driver(deletion_requested=ago(1)),)),
        [
            ("Normal", "NewAttempt", "driver 2 takes over from driver 1 (PodDeleted)"),
            ("Normal", "PodCreated", "created the pod of driver 2"),
        ],
    ),
    (
        "its program does nothing",
        replace(
            running(deadlines={"progressSeconds": 60}),
            drivers=(driver(container=Container(running=True, started=ago(90))),),
            session=idle(),
            progress=Answer(report=told(3), idle_since=ago(90)),
        ),
        [
            ("Warning", "DriverFailed", "the driver in pod poems-driver-a1 has reported nothing new for 60 s"),
            ("Normal", "NewAttempt", "driver 2 takes over from driver 1 (NoProgress)"),
            ("Normal", "PodCreated", "created the pod of driver 2"),
        ],
    ),
    (
        "its first driver fails before the status tells of it",
        observed(drivers=(failed(1),)),
        [("Normal", "PodCreated", "created the pod of driver 2")],
    ),
    ("its successor is waited for", replace(GONE, session=waiting()), []),
    (
        "its successor was made before",
        replace(BASE, drivers=(failed(1), driver(2)), progress=Answer()),
        [
            ("Warning", "DriverFailed", "the driver in pod poems-driver-a1 ended with exit code 1"),
            ("Normal", "NewAttempt", "driver 2 takes over from driver 1 (DriverFailed)"),
        ],
    ),
    ("it rests", SUSPENDED, [("Normal", "Suspended", "the job is suspended (spec.suspend)")]),
    (
        "it is done",
        replace(BASE, progress=Answer(report=told(3, done=True))),
        [
            (
                "Normal",
                "Completed",
                "Succeeded: the driver has reported that its work is done, with iteration 3",
            )
        ],
    ),
    (
        "its program has failed too often",
        replace(WITHOUT_BUDGET, drivers=(failed(),)),
        [
            (
                "Warning",
                "Failed",
                "DriverFailed: the driver in pod poems-driver-a1 ended with exit code 1, once more than",
            )
        ],
    ),
    (
        "its nodes are lost too often",
        replace(WITHOUT_BUDGET, drivers=()),
        [
            (
                "Warning",
                "Stalled",
                "BudgetExhausted: no attempt is left in spec.recovery.infrastructure; the last cause:",
            )
        ],
    ),
    ("its session can't be shared", LONG, [("Warning", "Stalled", "ClaimNotShared: the journal's claim of")]),
]


@pytest.mark.parametrize(("observation", "story"), [row[1:] for row in STORIES], ids=[row[0] for row in STORIES])
def test_what_happens_is_told_once(observation: ObservedJob, story: list[tuple[str, str, str]]) -> None:
    """With its type, in the order in which it happened; the next pass over the same has nothing to tell."""
    result = decided(observation)
    assert len(result.events) == len(story)
    for event, (kind, reason, message) in zip(result.events, story, strict=True):
        assert (event.type, event.reason) == (kind, reason)
        assert event.message.startswith(message)
    assert [event.order[1] for event in result.events] == list(range(len(story)))
    assert {event.order[0] for event in result.events} <= {result.status.attempt if result.status else 0}
    if result.create_pod or result.apply_session:
        return
    assert decided(after(observation, result)).events == ()


def test_first_driver_takes_over_from_nobody() -> None:
    """Though one of another job had the name before."""
    result = decided(observed(taken_attempts=frozenset({4})))
    assert [event.reason for event in result.events] == ["PodCreated"]


def test_each_occurrence_has_a_key_of_its_own() -> None:
    """The API server has each of them once: that of the second failure, and of the second stall, is another."""
    keys: list[tuple[str, str]] = []
    base: ObservedJob = BASE
    for attempt in (1, 2, 3):
        now = base.now + timedelta(seconds=70)
        base = replace(base, now=now, drivers=(failed(attempt),), progress=Answer())
        result = decided(base)
        keys += [(event.reason, event.key) for event in result.events]
        base = after(base, result)
    assert len(set(keys)) == len(keys) == 9
    assert [key for reason, key in keys if reason == "DriverFailed"] == ["2", "3", "4"]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_stall_that_comes_again_is_told_again(seconds: float) -> None:
    """It began at another time."""

    def key(now: Any) -> str:
        stuck = replace(LONG, now=now)
        [event] = decided(stuck).events
        return event.key

    assert (key(NOW) == key(NOW + timedelta(seconds=seconds))) == (seconds == 0.0)
