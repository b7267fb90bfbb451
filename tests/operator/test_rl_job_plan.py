"""What happens to an RLJob: tables over plain values."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core.jobs.observed import Driver, ObservedJob
from everloop_operator.core.jobs.plan import FORCE_DELETE_SECONDS
from everloop_operator.core.jobs.report import Point
from everloop_operator.core.jobs.status import urgent
from everloop_operator.core.observed import Answer, Container
from everloop_operator.core.refusals import Refusal
from tests.operator.builders import NOW, ago, lost
from tests.operator.job_builders import (
    PATH,
    TEMPLATE,
    after,
    condition,
    decided,
    driver,
    failed,
    idle,
    job,
    observed,
    pod,
    report,
    running,
    seen,
    status_of,
    told,
    variables,
    waiting,
)

# --- the first driver -----------------------------------------------------------------------------------------------


def test_first_pass_creates_the_driver() -> None:
    """Pod, credentials of attempt 1, status and event; nothing to go on from."""
    result = decided(observed())
    assert result.create_pod is not None
    assert result.create_pod["metadata"]["name"] == "poems-driver-a1"
    assert (result.credentials, status_of(result).phase, status_of(result).attempt) == (1, "Pending", 1)
    assert [event.reason for event in result.events] == ["PodCreated"]
    given = variables(result)
    assert (given["EVERLOOP_RESUME_FROM"], given["EVERLOOP_RESUME_ITERATION"]) == ("", "0")


def test_first_driver_starts_from_the_checkpoint_of_the_spec() -> None:
    """`start.checkpoint` is what the first driver, and its progress reader, are given."""
    result = decided(observed(job=job(start={"checkpoint": {"uri": f"{PATH}9"}})))
    assert variables(result)["EVERLOOP_RESUME_FROM"] == f"{PATH}9"
    assert variables(result, "progress")["EVERLOOP_START_FROM"] == f"{PATH}9"


@pytest.mark.parametrize(
    ("session", "reason", "phase"),
    [
        (None, "SessionNotFound", "Pending"),
        (waiting(), "SessionNotServing", "Pending"),
        (idle("Refuse"), "SessionNotServing", "Pending"),
        (seen(mode="Exclusive"), "ClaimNotShared", "Failed"),
    ],
)
def test_no_driver_without_a_session_that_serves(session: Any, reason: str, phase: str) -> None:
    """The status says what is missing; a claim that can't be shared is for somebody to change."""
    result = decided(observed(session=session))
    assert (result.create_pod, result.credentials) == (None, None)
    assert condition(result, "SessionReady")[:2] == ("False", reason)
    assert status_of(result).phase == phase


def test_idle_session_is_woken_by_the_driver() -> None:
    """Its calls are what wakes it: waiting for it to serve would be waiting for ever."""
    assert decided(observed(session=idle())).create_pod is not None


def test_own_session_is_created_and_then_waited_for() -> None:
    """The template's spec under the job's name, with the job as owner; no second one once it is there."""
    first = observed(job=job(**TEMPLATE), session=None)
    result = decided(first)
    assert result.apply_session is not None
    metadata = result.apply_session["metadata"]
    assert (metadata["name"], metadata["ownerReferences"][0]["uid"]) == ("poems", "uid-job")
    assert result.create_pod is None
    assert "SessionCreated" in [event.reason for event in result.events]
    second = decided(after(first, result, session=replace(waiting(), owner="uid-job")))
    assert (second.apply_session, second.create_pod) == (None, None)
    assert decided(after(first, result, session=seen(owner="uid-job"))).create_pod is not None


def test_session_of_somebody_else_under_the_name_is_left_alone() -> None:
    """A template makes no claim on a session that is there already."""
    result = decided(observed(job=job(**TEMPLATE), session=seen(owner="uid-other")))
    assert (result.apply_session, result.create_pod) == (None, None)
    assert condition(result, "Stalled")[:2] == ("True", "SessionNameTaken")


# --- while it runs --------------------------------------------------------------------------------------------------


def test_running_job_shows_its_progress() -> None:
    """What the progress reader says is in the status, with the time that is left."""
    base = running(limits={"maxIterations": 100})
    extra: dict[str, Any] = {
        "reward": "-0.5",
        "secondsPerIteration": "2.5",
        "evaluation": {"iteration": 8, "metric": "solved", "value": "0.25", "time": ""},
    }
    status = status_of(decided(replace(base, progress=Answer(report=told(10, **extra)))))
    assert status.progress is not None
    assert (status.phase, status.progress.iteration, status.progress.reward) == ("Running", 10, "-0.5")
    assert status.progress.eta_seconds == 225
    assert status.evaluation is not None
    assert (status.evaluation.iteration, status.evaluation.value) == (8, "0.25")
    assert status.latest_checkpoint is not None
    assert status.latest_checkpoint.location == f"{PATH}10"


def test_plan_of_the_result_is_nothing() -> None:
    """A second pass over the same state writes nothing, creates nothing, tells nothing."""
    base = running()
    result = decided(base)
    assert (result.status, result.create_pod, result.delete_pods, result.events) == (base.job.status, None, (), ())
    assert result.credentials == 1


def test_progress_is_not_urgent() -> None:
    """Iterations that go on are written every 15 seconds; a change of phase at once."""
    base = running()
    later = status_of(decided(replace(base, progress=Answer(report=told(4)))))
    assert later != base.job.status
    assert not urgent(base.job.status, later)
    assert urgent(base.job.status, status_of(decided(replace(base, drivers=(failed(),)))))


def test_reader_that_is_silent_is_told_of_and_changes_nothing() -> None:
    """The driver may well go on; the last progress stays."""
    base = running()
    silent = Answer(report=told(3), unreachable_since=ago(60), problem="ReadTimeout")
    result = decided(replace(base, progress=silent))
    assert status_of(result).phase == "Running"
    assert "ReadTimeout" in condition(result, "Ready")[2]
    assert status_of(result).progress == base.job.status.progress


def test_operator_that_has_just_started_keeps_what_is_known() -> None:
    """Until the first answer the recorded progress stands, and is what a successor would go on from."""
    base = replace(running(iteration=7), progress=Answer())
    assert status_of(decided(base)).progress is not None
    assert status_of(decided(base)).progress.iteration == 7  # type: ignore[union-attr]
    assert variables(decided(replace(base, drivers=())))["EVERLOOP_RESUME_ITERATION"] == "7"


# --- losses ---------------------------------------------------------------------------------------------------------

GONE_NODES = {"node-a": lost()}


@pytest.mark.parametrize(
    ("drivers", "nodes", "reason", "budget"),
    [
        ((), None, "PodLost", "infrastructure"),
        ((failed(code=1),), None, "DriverFailed", "application"),
        ((failed(code=137, reason="OOMKilled"),), None, "DriverFailed", "application"),
        ((failed(failure="Evicted: the node was low on memory"),), None, "PodFailed", "infrastructure"),
        ((failed(failure="NodeShutdown: the node is shutting down"),), None, "PodFailed", "infrastructure"),
        ((driver(phase="Failed", failure="UnexpectedAdmissionError: no"),), None, "PodFailed", "infrastructure"),
        ((failed(disruption="PreemptionByScheduler"),), None, "PodDeleted", "none"),
        ((driver(disruption="EvictionByEvictionAPI"),), None, "PodDeleted", "none"),
        ((driver(deletion_requested=ago(1)),), None, "PodDeleted", "none"),
        ((driver(),), GONE_NODES, "NodeLost", "infrastructure"),
        ((driver(),), {}, "NodeGone", "infrastructure"),
        ((driver(template_hash="other"),), None, "SpecChanged", "none"),
    ],
)
def test_lost_driver_has_a_successor(drivers: tuple[Driver, ...], nodes: Any, reason: str, budget: str) -> None:
    """It goes on from the last checkpoint that was reported; only the budget that it is the fault of is used."""
    base = running(iteration=5)
    result = decided(replace(base, drivers=drivers, nodes=base.nodes if nodes is None else nodes))
    given = variables(result)
    assert (given["EVERLOOP_RESUME_FROM"], given["EVERLOOP_RESUME_ITERATION"]) == (f"{PATH}5", "5")
    status = status_of(result)
    assert (status.attempt, status.phase, result.credentials) == (2, "Recovering", 2)
    [entry] = status.recoveries
    assert (entry.id, entry.reason, entry.iteration) == ("a2", reason, 5)
    assert status.budgets is not None
    used = {"infrastructure": status.budgets.infrastructure.used, "application": status.budgets.application.used}
    assert used == {kind: int(kind == budget) for kind in used}


def test_node_that_flaps_costs_nothing() -> None:
    """Not Ready for less than the limit: the driver goes on, and the pass comes back in time."""
    result = decided(replace(running(), nodes={"node-a": lost(seconds=0.5)}))
    assert result.create_pod is None
    assert result.requeue_after == pytest.approx(1.5)


def test_node_that_may_not_be_seen_is_not_taken_for_gone() -> None:
    """An installation without rights on nodes knows of losses through pods only."""
    base = replace(running(), nodes={}, nodes_watched=False)
    assert decided(base).create_pod is None
    assert decided(replace(base, drivers=())).create_pod is not None


def test_last_words_count_more_than_the_last_answer() -> None:
    """What the driver reported after the operator asked for the last time is not done again."""
    base = running(iteration=5)
    words = told(6)
    result = decided(replace(base, drivers=(replace(failed(), final=words),)))
    assert variables(result)["EVERLOOP_RESUME_ITERATION"] == "6"


def test_driver_is_held_back_while_the_storage_knows_better() -> None:
    """A reader that calls its pod stale has a successor that is given what the storage says, at no cost."""
    base = running(attempt=2, iteration=5)
    stale = report(2, "Stale", resume={"iteration": 6, "checkpoint": f"{PATH}6"})
    drivers = (driver(2, ready=False),)
    result = decided(replace(base, drivers=drivers, progress=Answer(report=stale)))
    assert variables(result)["EVERLOOP_RESUME_FROM"] == f"{PATH}6"
    status = status_of(result)
    assert status.recoveries[-1].reason == "NewerCheckpoint"
    assert status.budgets is not None
    assert (status.budgets.infrastructure.used, status.budgets.application.used) == (0, 0)


def test_report_of_another_attempt_is_not_believed() -> None:
    """A reader that answers for an older attempt changes nothing."""
    base = running(attempt=2, iteration=5)
    result = decided(replace(base, progress=Answer(report=told(99, attempt=1))))
    assert status_of(result).progress == base.job.status.progress


def test_successor_waits_for_the_session() -> None:
    """A driver that is lost together with its session starts once that serves: it would only fail before."""
    base = running()
    result = decided(replace(base, drivers=(), session=waiting()))
    assert (result.create_pod, status_of(result).phase) == (None, "Recovering")
    assert status_of(result).attempt == 1
    assert decided(after(base, result, drivers=())).create_pod is not None


def test_cause_of_a_loss_outlasts_the_wait_for_a_successor() -> None:
    """Whatever becomes of the pod meanwhile: a failed program stays its own fault, and a lost node is told of."""
    base = replace(running(), session=waiting())
    for first, reason, budget in (((failed(),), "DriverFailed", "application"), ((), "PodLost", "infrastructure")):
        lost_one = after(base, decided(replace(base, drivers=first)), drivers=(), session=seen())
        status = status_of(decided(lost_one))
        assert status.recoveries[-1].reason == reason
        assert status.budgets is not None
        assert getattr(status.budgets, budget).used == 1
        assert status.loss is None


def test_living_driver_outlasts_a_session_that_recovers() -> None:
    """Its calls are held at the gateway: nothing is done to it."""
    base = running()
    result = decided(replace(base, session=waiting()))
    assert (result.create_pod, result.delete_pods, status_of(result).phase) == (None, (), "Running")
    assert condition(result, "SessionReady")[0] == "False"


def test_old_pods_go() -> None:
    """A predecessor is deleted, and without proof of its death removed from the API after a while."""
    base = running(attempt=2)
    zombie = driver(1)
    [deletion] = decided(replace(base, drivers=(*base.drivers, zombie))).delete_pods
    assert (deletion.name, deletion.force) == ("poems-driver-a1", False)
    leaving = driver(1, deletion_requested=ago(FORCE_DELETE_SECONDS - 1))
    result = decided(replace(base, drivers=(*base.drivers, leaving)))
    assert result.delete_pods == ()
    assert result.requeue_after == pytest.approx(1)
    stuck = driver(1, deletion_requested=ago(FORCE_DELETE_SECONDS + 1))
    [deletion] = decided(replace(base, drivers=(*base.drivers, stuck))).delete_pods
    assert deletion.force


def test_pod_that_is_ahead_of_the_status_is_adopted() -> None:
    """The pass that made it came no further: its story is told now, and its loss is counted once."""
    base = running(iteration=5)
    ahead = replace(base, drivers=(failed(1), driver(2, Point(iteration=5, checkpoint=f"{PATH}5"))))
    result = decided(ahead)
    status = status_of(result)
    assert (result.create_pod, status.attempt) == (None, 2)
    assert [entry.reason for entry in status.recoveries] == ["DriverFailed"]
    assert status.budgets is not None
    assert status.budgets.application.used == 1


def test_name_of_a_pod_of_a_deleted_job_is_not_taken() -> None:
    """A job that is created again counts on from the pods of its predecessor."""
    assert status_of(decided(observed(taken_attempts=frozenset({4})))).attempt == 5


# --- budgets --------------------------------------------------------------------------------------------------------


def exhaust(base: ObservedJob, make: Any) -> tuple[ObservedJob, int]:
    """Lets each driver fail as soon as it is there, until none follows; the last observation, and their number."""
    for attempt in range(1, 50):
        base = replace(base, now=base.now + timedelta(seconds=70), drivers=(make(attempt),), progress=Answer())
        result = decided(base)
        base = after(base, result)
        if result.create_pod is None:
            return base, attempt
    raise AssertionError("no end")


def test_application_budget_ends_the_job() -> None:
    """One failure more than the budget: Failed for good, with exit code, remedy and the end of the output."""
    base = running(recovery={"application": {"maxAttempts": 3, "windowSeconds": 3600}})
    secret = f"line\nTINKER_API_KEY=tml-0123456789ab-{'x' * 43}\nValueError: no reward"
    end, attempts = exhaust(base, lambda attempt: failed(attempt, code=3, output=secret))
    status = end.job.status
    assert attempts == 4
    assert (status.phase, status.finish_time is not None) == ("Failed", True)
    assert status.failure is not None
    assert (status.failure.reason, status.failure.exit_code, status.failure.attempt) == ("DriverFailed", 3, 4)
    assert "ValueError: no reward" in status.failure.log_tail
    assert "tml-" not in status.failure.log_tail
    stalled = next(c for c in status.conditions if c.type == "Stalled")
    assert stalled.status == "True"
    assert "exit code 3" in stalled.message
    later = decided(replace(end, now=end.now + timedelta(days=1)))
    assert (later.create_pod, later.credentials, later.keep_key) == (None, None, False)


def test_out_of_memory_has_its_remedy() -> None:
    """The field to change is named."""
    base = running(recovery={"application": {"maxAttempts": 0}})
    status = status_of(decided(replace(base, drivers=(failed(code=137, reason="OOMKilled"),))))
    assert status.failure is not None
    assert status.failure.reason == "DriverOutOfMemory"
    assert "spec.runner.resources.limits.memory" in status.failure.remedy


def test_infrastructure_budget_refills() -> None:
    """Failed until enough has left the window; then the job goes on by itself."""
    base = running(recovery={"infrastructure": {"maxAttempts": 2, "windowSeconds": 3600}})
    end, attempts = exhaust(base, lambda attempt: driver(attempt, phase="Failed", failure="Evicted: full"))
    assert attempts == 3
    assert (end.job.status.phase, end.job.status.finish_time) == ("Failed", None)
    wait = decided(end).requeue_after
    assert wait is not None
    assert decided(replace(end, now=end.now + timedelta(seconds=wait - 1))).create_pod is None
    assert decided(replace(end, now=end.now + timedelta(seconds=wait + 1))).create_pod is not None


def test_failures_back_off() -> None:
    """The second failure in a row waits before the next try, and says until when."""
    base = running()
    first = decided(replace(base, drivers=(failed(1),)))
    again = after(base, first, drivers=(failed(2),), now=NOW + timedelta(seconds=1))
    result = decided(again)
    assert (result.create_pod, status_of(result).phase) == (None, "Recovering")
    assert result.requeue_after == pytest.approx(1)
    assert decided(after(again, result, now=NOW + timedelta(seconds=3))).create_pod is not None


def test_failure_that_was_overcome_is_still_shown() -> None:
    """What went wrong can be read while the next driver runs."""
    base = running()
    first = after(base, decided(replace(base, drivers=(failed(1, code=9),))), drivers=(driver(2),))
    status = status_of(decided(first))
    assert status.phase == "Running"
    assert status.failure is not None
    assert status.failure.exit_code == 9


# --- trouble --------------------------------------------------------------------------------------------------------


def test_refused_pod_is_told_in_the_words_of_the_api_server() -> None:
    """And tried again after a while, or at once when the spec changes."""
    refusal = Refusal("quota exceeded", NOW, generation=1)
    result = decided(observed(refusal=refusal))
    assert (result.create_pod, condition(result, "Stalled")[1]) == (None, "PodInvalid")
    assert "quota exceeded" in condition(result, "Ready")[2]
    assert decided(observed(refusal=refusal, job=replace(job(), generation=2))).create_pod is not None
    assert decided(observed(refusal=replace(refusal, time=ago(60)))).create_pod is not None
    fresh = decided(observed(refusal=replace(refusal, forbidden_since=ago(1))))
    assert (fresh.create_pod, condition(fresh, "Stalled")[0]) == (None, "False")
    assert fresh.requeue_after == pytest.approx(5)


@pytest.mark.parametrize(
    ("where", "reason", "shown"),
    [("driver", "ImagePullBackOff", "ImageUnavailable"), ("reader", "CreateContainerConfigError", "DriverBlocked")],
)
def test_pod_that_cannot_start_is_explained(where: str, reason: str, shown: str) -> None:
    """The kubelet's words for either container."""
    stuck = Container(waiting_reason=reason, waiting_message="no such thing")
    found = driver(ready=False, phase="Pending", container=stuck if where == "driver" else Container())
    if where == "reader":
        found = replace(found, reader=stuck)
    result = decided(replace(observed(), job=job(RLJobStatus(attempt=1)), drivers=(found,)))
    assert condition(result, "PodsReady")[:2] == ("False", shown)
    assert "no such thing" in condition(result, "Ready")[2]


def test_job_that_cannot_be_read_is_left_alone() -> None:
    """What runs goes on, and its key stays."""
    broken = replace(job(running().job.status), spec=None, problem="spec.runner: missing")
    result = decided(replace(running(), job=broken))
    assert (result.delete_pods, result.keep_key) == ((), True)
    assert condition(result, "Stalled")[1] == "InvalidSpec"


def test_deleted_job_is_left_to_the_garbage_collector() -> None:
    """No finalizer: nothing has to be done first."""
    result = decided(replace(running(), job=replace(running().job, deleting=True)))
    assert (result.status, result.create_pod, result.keep_key) == (None, None, False)


def test_pod_of_tests_is_the_one_of_the_spec() -> None:
    """The builders' pod counts as current."""
    assert decided(replace(running(), drivers=(Driver(pod(), Point()),))).create_pod is None
