"""What the status of an RLJob says, and what it leaves out: tables over plain values."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api.rl_job_status import Failure, JobBudgetsStatus, JobRecovery, LossStatus, RLJobStatus
from everloop_operator.api.training_session_status import BudgetStatus, Condition, PodStatus
from everloop_operator.core.jobs.observed import ObservedJob
from everloop_operator.core.jobs.report import Point
from everloop_operator.core.jobs.status import dump, urgent
from everloop_operator.core.observed import Answer
from everloop_operator.core.projections import format_time
from tests.operator.builders import NOW
from tests.operator.job_builders import (
    after,
    decided,
    driver,
    failed,
    job,
    observed,
    report,
    running,
    seen,
    spec,
    status_of,
    told,
    variables,
    waiting,
)


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


# --- what is written at once ----------------------------------------------------------------------------------------

BEFORE = status_of(decided(replace(running(), drivers=(failed(),))))
BUDGETS = BEFORE.budgets or JobBudgetsStatus()
MORE = BudgetStatus(used=9, limit=9, failures=[format_time(NOW)] * 2)


def conditions(**change: str) -> list[Condition]:
    return [BEFORE.conditions[0].model_copy(update=change), *BEFORE.conditions[1:]]


@pytest.mark.parametrize(
    ("change", "at_once"),
    [
        ({"observed_generation": 9}, True),
        ({"phase": "Pending"}, True),
        ({"attempt": 9}, True),
        ({"session": None}, True),
        ({"pod": None if BEFORE.pod else PodStatus(name="other")}, True),
        ({"conditions": conditions(status="Unknown")}, True),
        ({"conditions": conditions(reason="Other")}, True),
        ({"conditions": conditions(message="other")}, False),
        ({"recoveries": []}, True),
        ({"active_since": None}, True),
        ({"active_seconds": 99}, False),
        ({"finish_time": format_time(NOW)}, True),
        ({"budgets": BUDGETS.model_copy(update={"infrastructure": MORE})}, True),
        ({"budgets": BUDGETS.model_copy(update={"application": MORE})}, True),
        ({"budgets": None}, True),
        ({"budgets": BUDGETS.model_copy(update={"infrastructure": BudgetStatus(limit=99)})}, False),
        ({"loss": LossStatus(reason="PodLost", budget="infrastructure")}, True),
        ({"failure": None}, True),
        ({"failure": BEFORE.failure.model_copy(update={"attempt": 9}) if BEFORE.failure else None}, True),
        ({"failure": BEFORE.failure.model_copy(update={"log_tail": "x"}) if BEFORE.failure else None}, False),
        ({"progress": None}, False),
        ({"latest_checkpoint": None}, False),
        ({}, False),
    ],
)
def test_what_somebody_waits_for_is_written_at_once(change: dict[str, Any], at_once: bool) -> None:
    """A person, a program or the next pass; all else within 15 seconds."""
    assert urgent(BEFORE, BEFORE.model_copy(update=change)) == at_once


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (1, "Error", "an error of its own: see logTail"),
        (126, "Error", "check spec.runner.command and spec.runner.image"),
        (127, "Error", "check spec.runner.command and spec.runner.image"),
        (134, "Error", "let it report `done`"),
        (139, "Error", "let it report `done`"),
        (137, "Error", "killed by a signal from outside"),
        (143, "Error", "killed by a signal from outside"),
        (137, "OOMKilled", "spec.runner.resources.limits.memory"),
    ],
)
def test_every_end_of_a_program_has_its_remedy(code: int, reason: str, remedy: str) -> None:
    """By exit code, or by what the kubelet says of it."""
    failure = status_of(decided(replace(running(), drivers=(failed(code=code, reason=reason),)))).failure
    assert failure
    assert (failure.reason, failure.exit_code) == (
        "DriverOutOfMemory" if reason == "OOMKilled" else "DriverFailed",
        code,
    )
    assert remedy in failure.remedy


def test_what_was_read_of_a_failed_driver_outlasts_its_pod() -> None:
    """Its successor is waited for: what the log said can't be read again, but is known."""
    first = replace(running(), drivers=(failed(code=3, output="ValueError"),), session=waiting())
    gone = after(first, decided(first), drivers=())
    failure = status_of(decided(gone)).failure
    assert failure == first_failure(first)
    assert failure.log_tail == "ValueError"
    stranger = gone.job.status.model_copy(update={"failure": failure.model_copy(update={"attempt": 7})})
    other = status_of(decided(replace(gone, job=replace(gone.job, status=stranger)))).failure
    assert other
    assert (other.attempt, other.log_tail) == (1, "")


def first_failure(observation: ObservedJob) -> Failure:
    found = status_of(decided(observation)).failure
    assert found
    return found


# --- pod, progress, time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "uid"),
    [
        ({}, "uid-old"),
        ({"uid": "uid-other"}, "uid-node-a"),
        ({"node": "node-b"}, "uid-node-a"),
        ({"node_uid": ""}, "uid-node-a"),
    ],
)
def test_uid_of_a_node_is_that_of_when_the_driver_was_bound(change: dict[str, str], uid: str) -> None:
    """Another node under its name is how a replacement shows; of another pod or node it says nothing."""
    base = running()
    assert base.job.status.pod
    bound = base.job.status.pod.model_copy(update={"node_uid": "uid-old", **change})
    written = base.job.status.model_copy(update={"pod": bound})
    shown = status_of(decided(replace(base, job=replace(base.job, status=written), session=waiting()))).pod
    assert shown
    assert shown.node_uid == uid


@pytest.mark.parametrize(
    ("limits", "pace", "eta"),
    [({"maxIterations": 9}, "2.5", 15), ({"maxIterations": 9}, None, None), ({}, "2.5", None)],
)
def test_time_that_is_left(limits: dict[str, int], pace: str | None, eta: int | None) -> None:
    """Rounded up; unknown without a limit or a pace, and while nobody tells."""
    base = running(limits=limits)
    progress = status_of(decided(replace(base, progress=Answer(report=told(3, secondsPerIteration=pace))))).progress
    assert progress
    assert (progress.eta_seconds, progress.max_iterations) == (eta, limits.get("maxIterations"))
    silent = status_of(decided(replace(base, progress=Answer()))).progress
    assert silent
    assert (silent.eta_seconds, silent.max_iterations) == (None, limits.get("maxIterations"))


def test_no_time_is_left_once_there_are_more_iterations_than_asked_for() -> None:
    """And none that is negative."""
    base = running(limits={"maxIterations": 9})
    over = status_of(decided(replace(base, progress=Answer(report=told(12, secondsPerIteration="2.5")))))
    assert over.progress
    assert (over.phase, over.progress.eta_seconds) == ("Completed", 0)


def test_reader_that_has_not_read_the_storage_yet_says_nothing() -> None:
    """It does not know of any iteration: what was known stays, and is what a successor goes on from."""
    base = replace(running(iteration=7), progress=Answer(report=report(1, "Starting")))
    shown = status_of(decided(base))
    assert shown.progress == base.job.status.progress
    assert shown.latest_checkpoint == base.job.status.latest_checkpoint
    assert variables(decided(replace(base, drivers=())))["EVERLOOP_RESUME_ITERATION"] == "7"


def test_best_checkpoint_and_evaluation_are_those_of_the_reader() -> None:
    """None while it has none; what was known stays while nobody tells."""
    best = {"iteration": 2, "checkpoint": "tinker://m/weights/2", "value": "0.5"}
    evaluation = {"iteration": 2, "metric": "solved", "value": "0.5"}
    base = running()
    plain = status_of(decided(base))
    assert (plain.best_checkpoint, plain.evaluation) == (None, None)
    told_so = replace(base, progress=Answer(report=told(3, best=best, evaluation=evaluation)))
    then = status_of(decided(told_so))
    assert then.best_checkpoint
    assert then.best_checkpoint.location == "tinker://m/weights/2"
    assert then.evaluation
    silent = status_of(decided(after(told_so, decided(told_so), progress=Answer())))
    assert (silent.best_checkpoint, silent.evaluation) == (then.best_checkpoint, then.evaluation)


@pytest.mark.parametrize(("passed", "counted"), [(50, 50), (-50, 0)])
def test_time_of_a_rest_does_not_count(passed: int, counted: int) -> None:
    """What was before it does, once; a clock that was set back takes nothing away."""
    began = format_time(NOW - timedelta(seconds=passed))
    base = running(status=RLJobStatus(attempt=1, active_since=began, active_seconds=7))
    resting = replace(base, job=replace(base.job, spec=spec(suspend=True)))
    first = decided(resting)
    assert (status_of(first).active_since, status_of(first).active_seconds) == (None, 7 + counted)
    again = after(resting, first, now=NOW + timedelta(seconds=500))
    assert status_of(decided(again)).active_seconds == 7 + counted
    resumed = status_of(decided(replace(again, job=replace(again.job, spec=spec()), drivers=())))
    assert (resumed.active_since, resumed.active_seconds) == (format_time(again.now), 7 + counted)


@pytest.mark.parametrize(
    ("phase", "counts"),
    [("Queued", True), ("Pending", True), ("Recovering", True), ("Failed", True), ("Suspended", False)],
)
def test_what_counts_as_active(phase: str, counts: bool) -> None:
    """Everything but rest and end, from the first driver on."""
    gated = driver(ready=False, phase="Pending", node="", gates=("queue",))
    cases = {
        "Queued": observed(job=job(RLJobStatus(attempt=1)), drivers=(gated,)),
        "Pending": observed(),
        "Recovering": replace(running(), drivers=(failed(),)),
        "Failed": replace(running(recovery={"infrastructure": {"maxAttempts": 0}}), drivers=()),
        "Suspended": replace(running(), job=replace(running().job, spec=spec(suspend=True))),
    }
    result = status_of(decided(cases[phase]))
    assert (result.phase, result.active_since is not None) == (phase, counts)


def test_seconds_of_a_recovery_are_counted_once() -> None:
    """From the loss until the next driver runs; later passes, and a clock that was set back, change nothing."""
    base = running()
    lost = decided(replace(base, drivers=(failed(),)))
    for now, seconds in ((NOW + timedelta(seconds=12), "12.0"), (NOW - timedelta(seconds=12), "0.0")):
        starting = after(base, lost, drivers=(driver(2, ready=False),), now=now, progress=Answer())
        assert status_of(decided(starting)).recoveries[-1].seconds is None
        back = replace(starting, drivers=(driver(2),))
        result = decided(back)
        assert (status_of(result).recoveries[-1].seconds, status_of(result).recovery_count) == (seconds, 1)
        later = after(back, result, now=now + timedelta(seconds=99))
        assert status_of(decided(later)).recoveries == status_of(result).recoveries


def test_only_the_last_recoveries_are_kept() -> None:
    """All are counted."""
    old = [JobRecovery(id=f"a{n}", attempt=n, reason="PodLost", time=format_time(NOW)) for n in range(2, 12)]
    base = running(attempt=11, status=RLJobStatus(attempt=11, recoveries=old, recovery_count=30))
    lost = status_of(decided(replace(base, drivers=())))
    assert [entry.id for entry in lost.recoveries] == [*(f"a{n}" for n in range(3, 13))]
    assert lost.recovery_count == 31


def test_recovery_tells_where_its_driver_went_on() -> None:
    """What the pod was given, if it is there already; else what it will be given."""
    base = running(iteration=5)
    made = driver(2, Point(iteration=4, checkpoint="tinker://m/weights/4"))
    adopted = status_of(decided(replace(base, drivers=(failed(), made), progress=Answer())))
    assert adopted.recoveries[-1].iteration == 4
    assert status_of(decided(replace(base, drivers=(failed(),)))).recoveries[-1].iteration == 5


def test_driver_that_waits_for_its_successor_is_no_recovery_yet() -> None:
    """It will be one, of which the status tells when there is somebody who takes over."""
    base = replace(running(), drivers=(), session=waiting())
    first = decided(base)
    assert (status_of(first).recoveries, status_of(first).recovery_count) == ([], 0)
    assert status_of(decided(after(base, first))).recoveries == []


def test_first_driver_is_no_recovery() -> None:
    """Whatever its number is; nor does anybody take over from one that no status has told of."""
    early = status_of(decided(observed(drivers=(failed(1),))))
    assert (early.attempt, early.recoveries, early.recovery_count) == (2, [], 0)
    first = status_of(decided(observed(taken_attempts=frozenset({4}))))
    assert (first.attempt, first.recoveries, first.recovery_count) == (5, [], 0)


# --- after the end, and without a spec ------------------------------------------------------------------------------


def test_an_ended_job_says_that_it_has_seen_a_change() -> None:
    """And nothing else: it stays as it is, whatever its spec says then."""
    base = replace(running(), progress=Answer(report=told(3, done=True)))
    ended = after(base, decided(base))
    changed = replace(ended, job=replace(ended.job, generation=4))
    result = status_of(decided(changed))
    assert result.observed_generation == 4
    assert {item.observed_generation for item in result.conditions} == {4}
    older = {"observed_generation": 1}
    back = [item.model_copy(update=older) for item in result.conditions]
    assert result.model_copy(update={**older, "conditions": back}) == ended.job.status


def test_time_of_a_job_ends_with_it() -> None:
    """What it took until then stays in the status."""
    base = running(
        status=RLJobStatus(attempt=1, active_since=format_time(NOW - timedelta(seconds=40)), active_seconds=2)
    )
    ended = status_of(decided(replace(base, progress=Answer(report=told(3, done=True)))))
    assert (ended.active_since, ended.active_seconds) == (None, 42)


def test_what_is_written() -> None:
    """In the words of the API, zeros included; what is unknown has no field."""
    written = dump(RLJobStatus(attempt=1))
    assert (written["attempt"], written["activeSeconds"], written["phase"]) == (1, 0, "")
    assert "pod" not in written
    assert None not in written.values()


def test_failure_is_forgotten_by_success_only() -> None:
    """A job that has Failed says why for as long as it is there."""
    base = running()
    then = base.job.status.model_copy(update={"failure": Failure(reason="DriverFailed", attempt=1)})
    done = replace(base, job=replace(base.job, status=then), progress=Answer(report=told(3, done=True)))
    assert status_of(decided(done)).failure is None
    no_more = running(recovery={"application": {"maxAttempts": 0}})
    assert status_of(decided(replace(no_more, drivers=(failed(),)))).failure


def test_job_that_can_not_be_read_says_why() -> None:
    """With the time of its last readable spec's findings left as they are."""
    base = running()
    broken = replace(base.job, spec=None, problem="spec.runner: missing", generation=3)
    result = decided(replace(base, job=broken))
    found = status_of(result)
    assert (found.phase, found.observed_generation, found.attempt, found.pod) == (
        "Failed",
        3,
        base.job.status.attempt,
        base.job.status.pod,
    )
    shown = {item.type: (item.status, item.reason, item.message) for item in found.conditions}
    assert shown["Ready"] == ("False", "InvalidSpec", "spec.runner: missing")
    assert shown["Stalled"] == ("True", "InvalidSpec", "spec.runner: missing")
    assert shown["SessionReady"][:2] == shown["PodsReady"][:2] == ("Unknown", "InvalidSpec")
