"""What the status of an RLJob says, and what it leaves out: tables over plain values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core.observed import Answer
from everloop_operator.core.projections import format_time
from tests.operator.builders import NOW
from tests.operator.job_builders import decided, driver, failed, job, observed, running, seen, status_of, told, waiting


def test_time_counts_from_the_first_driver() -> None:
    """A job that waits for its session has not begun."""
    assert status_of(decided(observed(session=waiting()))).active_since is None
    assert status_of(decided(observed())).active_since == format_time(NOW)


def test_session_is_told_with_its_uid() -> None:
    """Another one of the same name is another one."""
    told_session = status_of(decided(observed())).session
    assert told_session
    assert told_session.uid == seen().session.uid != ""
    none = status_of(decided(observed(session=None))).session
    assert none
    assert none.uid == ""


@pytest.mark.parametrize(("attempt", "reason"), [(0, None), (1, "Resumed")])
def test_reason_of_going_on_after_a_rest(attempt: int, reason: str | None) -> None:
    """If there has been a driver that another one goes on from."""
    resting = status_of(decided(observed(job=job(RLJobStatus(attempt=attempt), suspend=True))))
    assert (resting.loss.reason if resting.loss else None) == reason


def test_lost_node_is_no_failure_of_the_program() -> None:
    """`failure` is for a person to mend."""
    base = running()
    assert status_of(decided(replace(base, nodes={}))).failure is None
    assert status_of(decided(replace(base, drivers=(failed(),)))).failure is not None


def test_long_cause_is_cut() -> None:
    """What an admission plugin or a kubelet says may be longer than the schema allows."""
    cause = "Evicted: " + "x" * 2000
    lost = replace(running(), drivers=(failed(failure=cause),), session=waiting())
    loss = status_of(decided(lost)).loss
    assert loss
    assert len(loss.message) == 1024


def test_job_that_has_ended_names_no_pod_and_waits_for_nothing() -> None:
    """Though its driver is still there, or was just lost."""
    completed = status_of(decided(replace(running(), progress=Answer(report=told(3, done=True)))))
    assert (completed.phase, completed.pod, completed.loss) == ("Completed", None, None)
    before = replace(running(), drivers=(driver(deletion_requested=NOW),), session=waiting())
    lost = status_of(decided(before))
    assert lost.loss
    ended = replace(before, job=replace(before.job, status=lost), progress=Answer(report=told(3, done=True)))
    assert status_of(decided(ended)).loss is None
