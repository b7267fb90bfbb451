"""What a person is told of an RLJob: conditions, phases and events, as tables over plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.api.training_session_status import Condition
from everloop_operator.core.jobs.health import UNREACHABLE_PATIENCE_SECONDS
from everloop_operator.core.jobs.observed import ObservedJob, SeenSession
from everloop_operator.core.observed import Answer, Container
from everloop_operator.core.refusals import Refusal
from tests.operator.builders import NOW, ago, text
from tests.operator.job_builders import (
    TEMPLATE,
    condition,
    decided,
    driver,
    failed,
    idle,
    job,
    observed,
    queued,
    running,
    seen,
    spec,
    status_of,
    told,
    waiting,
)

# --- the session ----------------------------------------------------------------------------------------------------

TITLE = 'TrainingSession "tuned"'


def known(session: SeenSession, **changes: Any) -> SeenSession:
    """The same session with another status."""
    status = session.session.status.model_copy(update=changes)
    return replace(session, session=replace(session.session, status=status))


def not_serving(message: str, status: str = "False") -> SeenSession:
    listed = [
        Condition(type="Serving", status=status, reason="Starting", message=message, last_transition_time=text(NOW))
    ]
    return known(seen(), conditions=listed)


SESSIONS: list[tuple[str, SeenSession | None, tuple[str, str, str]]] = [
    (
        "is not there",
        None,
        ("False", "SessionNotFound", f'{TITLE} (spec.session.ref) does not exist in namespace "team"'),
    ),
    ("is new", waiting(), ("False", "SessionNotServing", f"{TITLE} does not serve: it is new")),
    ("starts", not_serving("no pod"), ("False", "SessionNotServing", f"{TITLE} does not serve: no pod")),
    ("gives a reason only", not_serving(""), ("False", "SessionNotServing", f"{TITLE} does not serve: Starting")),
    ("is not known", not_serving("?", "Unknown"), ("False", "SessionNotServing", f"{TITLE} does not serve: ?")),
    ("serves", seen(), ("True", "Serving", f"{TITLE} serves")),
    ("has a fence that is not known", seen(mode=""), ("False", "SessionNotServing", f"{TITLE} does not serve: ")),
    ("has no storage yet", known(seen(), storage=None), ("False", "SessionNotServing", f"{TITLE} does not serve: ")),
    (
        "has a claim that can't be shared",
        seen(mode="NodeLocal"),
        ("False", "ClaimNotShared", f"the journal's claim of {TITLE} is not ReadWriteMany: a driver can't share it"),
    ),
    ("is idle", idle(), ("True", "Idle", f"{TITLE} is idle; the driver's first call wakes it")),
    ("is idle, and stays so", idle("Refuse"), ("False", "SessionNotServing", f"{TITLE} does not serve: it is new")),
]


@pytest.mark.parametrize(("session", "told_of_it"), [row[1:] for row in SESSIONS], ids=[row[0] for row in SESSIONS])
def test_what_is_said_of_the_session(session: SeenSession | None, told_of_it: tuple[str, str, str]) -> None:
    """Whether a driver can train on it, and if not why; a driver is made accordingly."""
    result = decided(observed(session=session))
    status, reason, message = condition(result, "SessionReady")
    assert (status, reason) == told_of_it[:2]
    assert message.startswith(told_of_it[2])
    assert (result.create_pod is not None) == (status == "True")


def test_other_conditions_of_the_session_do_not_count() -> None:
    """Ready it is also while it rests."""
    ready = Condition(type="Ready", status="True", reason="Serving", last_transition_time=text(NOW))
    starting = not_serving("no pod").session.status.conditions
    found = condition(decided(observed(session=known(seen(), conditions=[ready, *starting]))), "SessionReady")
    assert found == ("False", "SessionNotServing", f"{TITLE} does not serve: no pod")


def test_idle_session_of_an_unreadable_spec_is_not_counted_on() -> None:
    """Nobody knows whether a call would wake it."""
    unreadable = replace(idle(), session=replace(idle().session, spec=None))
    assert decided(observed(session=unreadable)).create_pod is None


def test_own_session_is_told_of_as_such() -> None:
    """It is being created; another one of that name is in the way for somebody to remove."""
    made = decided(observed(job=job(**TEMPLATE), session=None))
    assert condition(made, "SessionReady") == ("False", "SessionNotFound", 'TrainingSession "poems" is being created')
    own = decided(observed(job=job(**TEMPLATE), session=seen(owner="uid-job")))
    assert condition(own, "SessionReady")[:2] == ("True", "Serving")


def test_session_in_the_way_leaves_a_driver_that_runs_alone() -> None:
    """What can't be used for the next driver may still serve this one; without it the job is stalled."""
    base = replace(running(), session=seen(mode="Exclusive"))
    assert (status_of(decided(base)).phase, condition(decided(base), "Stalled")[0]) == ("Running", "False")
    for gone in (replace(base, drivers=()), replace(base, drivers=(driver(deletion_requested=ago(1)),))):
        assert condition(decided(gone), "Stalled")[:2] == ("True", "ClaimNotShared")


# --- phases ---------------------------------------------------------------------------------------------------------

FIRST = RLJobStatus(attempt=1)
STARTING = driver(ready=False, phase="Pending")
GATED = driver(ready=False, phase="Pending", node="", gates=("kueue.x-k8s.io/admission",))
UNSCHEDULABLE = driver(
    ready=False, phase="Pending", node="", unschedulable_since=ago(9), unschedulable_message="0/3 nodes are available"
)

PHASES: list[tuple[str, ObservedJob, str]] = [
    ("its session waits in line", observed(session=queued()), "Queued"),
    ("its session starts", observed(session=waiting()), "Pending"),
    ("it has no session", observed(session=None), "Pending"),
    ("its driver is being made", observed(), "Pending"),
    ("its driver starts", observed(job=job(FIRST), drivers=(STARTING,)), "Pending"),
    ("its driver finds no node", observed(job=job(FIRST), drivers=(UNSCHEDULABLE,)), "Queued"),
    ("its driver is kept back", observed(job=job(FIRST), drivers=(GATED,)), "Queued"),
    (
        "its driver starts while its session waits",
        observed(job=job(FIRST), drivers=(STARTING,), session=queued()),
        "Pending",
    ),
    ("its driver runs", running(), "Running"),
    ("its driver runs without its session", replace(running(), session=queued()), "Running"),
    ("its driver is lost", replace(running(), drivers=(failed(),)), "Recovering"),
    ("its first driver fails", observed(job=job(FIRST), drivers=(failed(),), session=waiting()), "Recovering"),
    (
        "its second driver starts",
        observed(job=job(RLJobStatus(attempt=2)), drivers=(driver(2, ready=False),)),
        "Recovering",
    ),
    ("its driver starts again", replace(running(), drivers=(driver(ready=False),)), "Recovering"),
    ("it recovers", observed(job=job(RLJobStatus(attempt=1, phase="Recovering")), drivers=(STARTING,)), "Recovering"),
    (
        "it is lost and its session is gone",
        replace(running(), drivers=(driver(deletion_requested=ago(1)),), session=None),
        "Recovering",
    ),
]


@pytest.mark.parametrize(("observation", "phase"), [row[1:] for row in PHASES], ids=[row[0] for row in PHASES])
def test_phases(observation: ObservedJob, phase: str) -> None:
    """Each is one combination of Ready and Reconciling, which say the same."""
    result = decided(observation)
    assert status_of(result).phase == phase
    ready, reconciling = condition(result, "Ready"), condition(result, "Reconciling")
    works = phase != "Running"
    assert (ready[0], reconciling[0]) == (str(not works), str(works))
    assert reconciling[1:] == (ready[1:] if works else ("AsExpected", ""))
    assert ready[1] == (phase if phase in ("Running", "Recovering") else "Waiting")
    assert condition(result, "Complete") == ("False", ready[1], "")


def test_rest_and_end_have_no_driver() -> None:
    """And say so; what Ready says of success, Complete says too."""
    base = running()
    rests = decided(replace(base, job=replace(base.job, spec=spec(suspend=True))))
    assert condition(rests, "PodsReady")[:2] == ("False", "Suspended")
    assert condition(rests, "Complete")[0] == "False"
    done = decided(replace(base, progress=Answer(report=told(3, done=True))))
    assert condition(done, "PodsReady") == ("False", "Succeeded", "the job has finished")
    assert condition(done, "Complete") == condition(done, "Ready")
    assert condition(done, "Complete")[2].startswith("the driver has reported that its work is done")


def test_driver_that_was_made_by_an_earlier_pass_runs() -> None:
    """What became of its predecessor is the story of that one."""
    base = replace(running(), drivers=(failed(1), driver(2)), progress=Answer())
    assert condition(decided(base), "PodsReady")[:2] == ("True", "Running")
    assert status_of(decided(base)).phase == "Running"


def test_time_goes_on_while_a_driver_waits_in_line() -> None:
    """What counts for limits.activeSeconds is not who is in the way."""
    waits = observed(job=job(FIRST), drivers=(GATED,))
    assert status_of(decided(waits)).active_since is not None


# --- the driver's pod -----------------------------------------------------------------------------------------------

PULLS = Container(waiting_reason="ErrImagePull", waiting_message="manifest unknown")
BLOCKED = Container(waiting_reason="StartError", waiting_message="exec: not found")
CREATING = Container(waiting_reason="ContainerCreating")

PODS: list[tuple[str, ObservedJob, tuple[str, str, str]]] = [
    ("is made", observed(), ("False", "PodCreating", "the driver is being created")),
    ("is waited with", observed(session=waiting()), ("False", "PodCreating", "there is no driver")),
    (
        "finds no node",
        observed(job=job(FIRST), drivers=(UNSCHEDULABLE,)),
        ("False", "Unschedulable", "pod poems-driver-a1: 0/3 nodes are available"),
    ),
    (
        "is kept back",
        observed(job=job(FIRST), drivers=(GATED,)),
        ("False", "SchedulingGated", "pod poems-driver-a1 is held back by kueue.x-k8s.io/admission"),
    ),
    ("runs", running(), ("True", "Running", "driver poems-driver-a1 runs on node-a")),
    (
        "can't be pulled",
        observed(job=job(FIRST), drivers=(replace(STARTING, reader=PULLS),)),
        ("False", "ImageUnavailable", "pod poems-driver-a1: ErrImagePull: manifest unknown"),
    ),
    (
        "can't be started",
        observed(job=job(FIRST), drivers=(driver(ready=False, container=BLOCKED),)),
        ("False", "DriverBlocked", "pod poems-driver-a1: StartError: exec: not found"),
    ),
    (
        "starts",
        observed(job=job(FIRST), drivers=(driver(ready=False, container=CREATING),)),
        ("False", "PodNotReady", "pod poems-driver-a1 is starting"),
    ),
    (
        "is lost",
        replace(running(), drivers=(driver(deletion_requested=ago(1)),), session=waiting()),
        ("False", "PodNotReady", "pod poems-driver-a1 is being deleted"),
    ),
]


@pytest.mark.parametrize(("observation", "told_of_it"), [row[1:] for row in PODS], ids=[row[0] for row in PODS])
def test_what_is_said_of_the_pod(observation: ObservedJob, told_of_it: tuple[str, str, str]) -> None:
    """In the words of scheduler and kubelet, where they have some."""
    assert condition(decided(observation), "PodsReady") == told_of_it


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
def test_every_way_in_which_an_image_is_missing(reason: str) -> None:
    """Of either container."""
    stuck = Container(waiting_reason=reason)
    for found in (driver(ready=False, container=stuck), replace(driver(ready=False), reader=stuck)):
        result = decided(observed(job=job(FIRST), drivers=(found,)))
        assert condition(result, "PodsReady")[1] == names.REASON_IMAGE_UNAVAILABLE


@pytest.mark.parametrize(
    "reason", ["CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"]
)
def test_every_way_in_which_a_container_can_not_start(reason: str) -> None:
    """Of either container."""
    stuck = Container(waiting_reason=reason)
    for found in (driver(ready=False, container=stuck), replace(driver(ready=False), reader=stuck)):
        result = decided(observed(job=job(FIRST), drivers=(found,)))
        assert condition(result, "PodsReady")[1] == names.REASON_DRIVER_BLOCKED


REFUSED = Refusal("quota exceeded", NOW, generation=1)
FRESH = replace(REFUSED, forbidden_since=ago(1))


@pytest.mark.parametrize(
    ("observation", "reason", "stalled"),
    [
        (observed(refusal=REFUSED), "PodInvalid", True),
        (observed(refusal=FRESH), "PodCreating", False),
        (observed(refusal=replace(REFUSED, time=ago(600))), "PodCreating", False),
        (replace(running(), refusal=REFUSED), "Running", False),
        (replace(running(), refusal=REFUSED, drivers=(driver(deletion_requested=ago(1)),)), "PodNotReady", True),
        (replace(running(), refusal=FRESH, drivers=(driver(deletion_requested=ago(1)),)), "PodNotReady", False),
        (replace(running(), refusal=REFUSED, drivers=()), "PodInvalid", True),
    ],
)
def test_refusal_counts_only_for_what_is_missing(observation: ObservedJob, reason: str, stalled: bool) -> None:
    """A driver that runs was not refused, and one that is tried again has not been yet."""
    result = decided(observation)
    assert condition(result, "PodsReady")[:2] == (str(reason == "Running"), reason)
    assert condition(result, "Stalled")[0] == str(stalled)
    if stalled:
        assert condition(result, "Stalled")[1:] == ("PodInvalid", "the driver's pod was refused: quota exceeded")


# --- what Ready says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"), [(UNREACHABLE_PATIENCE_SECONDS - 1, False), (UNREACHABLE_PATIENCE_SECONDS, True)]
)
def test_silence_is_told_once_it_has_lasted(seconds: float, said: bool) -> None:
    """A busy machine answers late."""
    silent = Answer(report=told(3), unreachable_since=ago(seconds), problem="ReadTimeout")
    message = condition(decided(replace(running(), progress=silent)), "Ready")[2]
    assert ("its progress can't be read (ReadTimeout)" in message) == said


def test_line_that_can_not_be_read_is_told() -> None:
    """In the words of the progress reader."""
    base = running()
    odd = replace(base, progress=Answer(report=told(3, problem="line 4: no iteration")))
    assert condition(decided(odd), "Ready")[2].endswith("; of its progress: line 4: no iteration")
    assert "progress" not in condition(decided(base), "Ready")[2]


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (observed(session=waiting()), f"{TITLE} does not serve: it is new"),
        (observed(), "the driver is being created"),
        (observed(job=job(FIRST), drivers=(STARTING,), session=waiting()), "pod poems-driver-a1 is starting"),
        (
            replace(running(), drivers=(driver(deletion_requested=ago(1)),), session=waiting()),
            f"pod poems-driver-a1 is being deleted; {TITLE} does not serve: it is new",
        ),
        (
            replace(running(), drivers=(driver(deletion_requested=ago(1)),)),
            "pod poems-driver-a1 is being deleted; the driver is being created",
        ),
        (
            replace(running(), drivers=(driver(deletion_requested=ago(1)),), refusal=FRESH),
            "pod poems-driver-a1 is being deleted",
        ),
    ],
)
def test_ready_says_what_is_waited_for(observation: ObservedJob, message: str) -> None:
    """The session before the driver, the driver once there is one; the same thing is not said twice."""
    assert condition(decided(observation), "Ready")[2] == message


def test_budget_that_is_used_up_is_named() -> None:
    """With the cause that used it up."""
    base = running(recovery={"infrastructure": {"maxAttempts": 0}})
    result = decided(replace(base, drivers=(driver(phase="Failed", failure="Evicted: full"),)))
    told_of_it = (
        "no attempt is left in spec.recovery.infrastructure; the last cause: pod poems-driver-a1 failed: Evicted: full "
        "(PodFailed)"
    )
    assert condition(result, "Stalled") == ("True", "BudgetExhausted", told_of_it)
    assert condition(result, "Ready") == ("False", "BudgetExhausted", told_of_it)
