"""Conditions, phases and deadlines: what a person is told."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.training_session_status import Condition, Recovery, TrainingSessionStatus
from everloop_operator.core.conditions import update
from everloop_operator.core.health import Aspect
from everloop_operator.core.observed import Claim, Container, Observed, Trainer
from everloop_operator.core.projections import container_of, pod_of
from everloop_operator.core.report import TrainerReport
from tests.operator.builders import (
    CLAIMS,
    NOW,
    after,
    ago,
    condition,
    decided,
    lost,
    observed,
    pending,
    pod,
    report,
    serving,
    session,
    status_of,
    text,
)

FIRST = TrainingSessionStatus(attempt=1)
OPENED = Recovery(id="a2", attempt=2, reason="NodeLost", node="node-b", time=text(ago(5)))
SECOND = TrainingSessionStatus(attempt=2, recoveries=[OPENED])
GATES = ("kueue.x-k8s.io/admission",)
MISMATCH = Container(exit_code=65, exit_message="StorageMismatch", finished=ago(9))
STARTING = observed(session=session(FIRST), pods=(pod(ready=False),), trainer=Trainer(report=report(1, "Starting")))

PHASES: list[tuple[str, Observed, str]] = [
    ("no pod yet", observed(), "Pending"),
    ("not scheduled", observed(session=session(FIRST), pods=(pending(),)), "Pending"),
    ("finds no node", observed(session=session(FIRST), pods=(pending(unschedulable_since=ago(9)),)), "Queued"),
    ("is kept back", observed(session=session(FIRST), pods=(pending(gates=GATES),)), "Queued"),
    ("has found a node", replace(STARTING, pods=(pod(ready=False, unschedulable_since=ago(9)),)), "Starting"),
    ("starts", STARTING, "Starting"),
    ("replays for the first time", replace(STARTING, trainer=Trainer(report=report(1, "Recovering"))), "Starting"),
    ("serves", serving(), "Running"),
    ("lost its engine", serving(trainer=Trainer(report=report(1, "Recovering"))), "Recovering"),
    (
        "second attempt waits",
        observed(session=session(SECOND), pods=(pending(2),)),
        "Recovering",
    ),
    ("second attempt finds no node", observed(session=session(SECOND), pods=(pending(2, gates=GATES),)), "Recovering"),
    ("node lost", serving(nodes={"node-a": lost()}), "Recovering"),
    (
        "storage mismatch",
        observed(
            session=session(FIRST),
            pods=(pod(ready=False, container=MISMATCH),),
        ),
        "Failed",
    ),
]

TABLE = {  # phase: Ready, Reconciling, Stalled, Serving
    "Queued": ("False", "True", "False", "False"),
    "Running": ("True", "False", "False", "True"),
    "Pending": ("False", "True", "False", "False"),
    "Starting": ("False", "True", "False", "False"),
    "Recovering": ("False", "True", "False", "False"),
    "Failed": ("False", "False", "True", "False"),
}


@pytest.mark.parametrize(("observation", "phase"), [row[1:] for row in PHASES], ids=[row[0] for row in PHASES])
def test_phases(observation: Observed, phase: str) -> None:
    """Each phase is one combination of the four conditions of kstatus and Serving."""
    result = decided(observation)
    assert status_of(result).phase == phase
    shown = tuple(condition(result, kind)[0] for kind in ("Ready", "Reconciling", "Stalled", "Serving"))
    assert shown == TABLE[phase]


CONTAINERS: list[tuple[str, Container, str, str]] = [
    ("pulls in vain", Container("ImagePullBackOff", "no such image"), "ImageUnavailable", "no such image"),
    ("crashed once", Container(exit_code=1, exit_message="boom", finished=ago(3), restarts=1), "CrashLoop", "boom"),
    ("crashed long ago", Container(exit_code=1, exit_message="boom", finished=ago(900), restarts=1), "PodNotReady", ""),
    ("is created", Container("ContainerCreating"), "PodNotReady", "ContainerCreating"),
]


@pytest.mark.parametrize(
    ("container", "reason", "words"), [row[1:] for row in CONTAINERS], ids=[row[0] for row in CONTAINERS]
)
def test_pods_ready_says_what_the_kubelet_says(container: Container, reason: str, words: str) -> None:
    """The condition quotes the container's state."""
    result = decided(observed(session=session(FIRST), pods=(pod(ready=False, container=container),)))
    status, found, message = condition(result, "PodsReady")
    assert (status, found) == ("False", reason)
    assert words in message


def waits(name: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"name": name, "restartCount": 0, "state": {"waiting": {"reason": reason, "message": message}}}


@pytest.mark.parametrize(
    ("before", "reason", "words"),
    [
        ((waits("shipper", "ImagePullBackOff", "manifest unknown"),), "ImageUnavailable", "shipper: manifest unknown"),
        (
            (waits("warm-up", "PodInitializing"), waits("shipper", "CreateContainerConfigError", 'secret "x"')),
            "ContainerInvalid",
            'shipper: secret "x"',
        ),
        ((waits("shipper", "CrashLoopBackOff", "back-off 10s"),), "PodNotReady", "CrashLoopBackOff: container shipper"),
        ((waits("warm-up", "PodInitializing"),), "PodNotReady", "PodInitializing"),
        ((), "PodNotReady", "PodInitializing"),
    ],
)
def test_pods_ready_names_the_container_that_holds_up_the_trainer(
    before: tuple[dict[str, Any], ...], reason: str, words: str
) -> None:
    """A sidecar or an init container that can't start, in the kubelet's words."""
    trainer = waits(names.TRAINER_CONTAINER, "PodInitializing")
    container = container_of({"containerStatuses": [trainer], "initContainerStatuses": before}, trainer["name"])
    result = decided(observed(session=session(FIRST), pods=(pod(ready=False, container=container),)))
    _, found, message = condition(result, "PodsReady")
    assert found == reason
    assert words in message


def test_crash_loop_stalls_after_three_restarts() -> None:
    """One crash may pass; a loop is a matter for a person, with exit code and message at hand."""
    ended = Container(exit_code=78, exit_message="EVERLOOP_CONFIG: adapters.maxRank", finished=ago(3))
    for restarts, phase in ((2, "Starting"), (3, "Failed")):
        broken = pod(ready=False, container=replace(ended, restarts=restarts))
        result = decided(observed(session=session(FIRST), pods=(broken,)))
        assert status_of(result).phase == phase
    assert condition(result, "Stalled")[1] == "CrashLoop"
    assert "exit code 78: EVERLOOP_CONFIG: adapters.maxRank" in condition(result, "Stalled")[2]


VOLUMES: list[tuple[str, dict[str, Claim | None], str, str]] = [
    ("missing", {"training": None, "models": CLAIMS["models"]}, "ClaimNotFound", '"training"'),
    ("model missing", {"training": CLAIMS["training"], "models": None}, "ClaimNotFound", '"models"'),
    (
        "pending",
        {**CLAIMS, "training": Claim("training", "uid-training", "Pending", frozenset())},
        "ClaimNotBound",
        '"training"',
    ),
    ("lost", {**CLAIMS, "training": Claim("training", "uid-training", "Lost", frozenset())}, "ClaimLost", '"training"'),
    ("unread", {}, "Unknown", '"training"'),
]


@pytest.mark.parametrize(("claims", "reason", "words"), [row[1:] for row in VOLUMES], ids=[row[0] for row in VOLUMES])
def test_volumes_ready_names_the_claim(claims: dict[str, Claim | None], reason: str, words: str) -> None:
    """Which claim, by name and field; the pod is made all the same, so that it starts once the claim is there."""
    result = decided(observed(claims=claims))
    _, found, message = condition(result, "VolumesReady")
    assert found == reason
    assert words in message
    assert "spec." in message
    assert result.create_pod is not None
    assert result.requeue_after == pytest.approx(10)


def test_storage_error_of_the_trainer_is_shown() -> None:
    """A journal that can't be written makes VolumesReady False in the trainer's words."""
    result = decided(serving(trainer=Trainer(report=report(storage={"error": "no space left"}))))
    assert condition(result, "VolumesReady")[1:] == ("StorageError", "the storage has trouble: no space left")
    storage = status_of(result).storage
    assert storage is not None
    assert storage.error == "no space left"


def test_storage_that_cannot_be_opened_is_shown() -> None:
    """A server that has claimed nothing yet says why: the conditions carry it, and the session does not serve."""
    opening = TrainerReport.model_validate({"state": "Opening", "storage": {"error": "identity.json: no JSON"}})
    result = decided(serving(trainer=Trainer(report=opening)))
    assert condition(result, "VolumesReady")[1:] == ("StorageError", "the storage has trouble: identity.json: no JSON")
    assert condition(result, "Serving")[0] == "False"
    assert "identity.json: no JSON" in condition(result, "Serving")[2]


def test_gates_are_named_and_have_no_deadline() -> None:
    """How long somebody's queue is does not count for deadlines.unschedulableSeconds."""
    gates = [{"name": "kueue.x-k8s.io/admission"}, {"name": "kueue.x-k8s.io/topology"}]
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "lastTransitionTime": text(ago(9))}
    body = {
        "metadata": {
            "name": "tuned-a1-0",
            "uid": "uid-pod-1",
            "creationTimestamp": text(ago(9 * 86_400)),
            "labels": {names.LABEL_ATTEMPT: "1"},
            "annotations": {names.ANNOTATION_TEMPLATE_HASH: pod().template_hash},
        },
        "spec": {"schedulingGates": gates},
        "status": {"phase": "Pending", "conditions": [gated]},
    }
    kept_back = pod_of(body)
    assert kept_back
    result = decided(observed(session=session(FIRST), pods=(kept_back,)))
    message = "pod tuned-a1-0 is held back by kueue.x-k8s.io/admission, kueue.x-k8s.io/topology"
    assert condition(result, "PodsReady") == ("False", "SchedulingGated", message)
    assert (status_of(result).phase, result.requeue_after) == ("Queued", None)


def test_a_session_that_was_queued_is_told_to_serve() -> None:
    """Though nothing was seen of its start."""
    waiting = observed(session=session(FIRST), pods=(pending(gates=GATES),))
    result = decided(after(waiting, decided(waiting), pods=(pod(),), trainer=Trainer(report=report())))
    assert [event.reason for event in result.events] == [names.EVENT_SERVING]


def test_scheduler_is_quoted_and_its_deadline_ends_in_failed() -> None:
    """Unschedulable: quoted at once, Failed after deadlines.unschedulableSeconds, and well again by itself."""
    waiting = pending(unschedulable_since=ago(100), unschedulable_message="0/3 nodes are available")
    result = decided(observed(session=session(FIRST), pods=(waiting,)))
    assert condition(result, "PodsReady")[1:] == ("Unschedulable", "pod tuned-a1-0: 0/3 nodes are available")
    assert status_of(result).phase == "Queued"
    assert result.requeue_after == pytest.approx(3500)
    late = decided(observed(session=session(FIRST), pods=(replace(waiting, unschedulable_since=ago(3601)),)))
    assert condition(late, "Stalled")[1] == "UnschedulableDeadlineExceeded"
    assert "0/3 nodes" in condition(late, "Stalled")[2]
    healed = decided(after(observed(session=session(FIRST), pods=(pod(),)), late, trainer=Trainer(report=report())))
    assert status_of(healed).phase == "Running"


def test_startup_deadline_counts_from_scheduling() -> None:
    """A pod that does not serve in time is Failed; serving after all heals it."""
    slow = replace(STARTING, pods=(pod(ready=False, scheduled=ago(1801)),))
    result = decided(slow)
    assert condition(result, "Stalled")[1] == "StartupDeadlineExceeded"
    healed = decided(after(slow, result, trainer=Trainer(report=report())))
    assert status_of(healed).phase == "Running"


def test_startup_deadline_starts_anew_when_the_engine_is_lost() -> None:
    """A pod that has served for days is not Failed the moment its engine is lost."""
    old = serving(pods=(pod(scheduled=ago(500_000)),), trainer=Trainer(report=report(1, "Recovering")))
    first = decided(old)
    assert status_of(first).phase == "Recovering"
    later = after(old, first, now=NOW + timedelta(seconds=1700))
    assert status_of(decided(later)).phase == "Recovering"
    much_later = after(old, first, now=NOW + timedelta(seconds=1801))
    assert condition(decided(much_later), "Stalled")[1] == "StartupDeadlineExceeded"


UNANSWERED: list[tuple[str, Trainer, str]] = [
    ("late for a moment", Trainer(report=report(), unreachable_since=ago(5), problem="ReadTimeout"), "True"),
    ("silent", Trainer(report=report(), unreachable_since=ago(10), problem="ReadTimeout"), "False"),
    ("not asked since the operator started", Trainer(), "True"),
    ("asked in vain since the operator started", Trainer(unreachable_since=ago(11), problem="x"), "False"),
    ("reports another attempt", Trainer(report=report(7)), "False"),
]


@pytest.mark.parametrize(("trainer", "serves"), [row[1:] for row in UNANSWERED], ids=[row[0] for row in UNANSWERED])
def test_silence_counts_only_after_a_while(trainer: Trainer, serves: str) -> None:
    """A busy machine delays an answer; ten seconds of silence are the loss of service, not of the pod."""
    result = decided(serving(trainer=trainer))
    assert condition(result, "Serving")[0] == serves
    assert result.create_pod is None


def test_silence_that_ends_leaves_nothing_behind() -> None:
    """The very answer of before is enough: Running again, at a new time, and nothing was charged or replaced."""
    told = serving()
    budgets = told.session.status.budgets
    silent = replace(
        told, now=NOW + timedelta(seconds=20), trainer=Trainer(report=report(), unreachable_since=NOW, problem="x")
    )
    lapse = decided(silent)
    assert (status_of(lapse).phase, condition(lapse, "Serving")[0]) == ("Recovering", "False")
    back = after(silent, lapse, now=NOW + timedelta(seconds=25), trainer=told.trainer)
    result = decided(back)
    assert (status_of(result).phase, condition(result, "Serving")[0]) == ("Running", "True")
    [was], [now] = (
        [c.last_transition_time for c in status.conditions if c.type == "Serving"]
        for status in (told.session.status, status_of(result))
    )
    assert now > was
    assert (lapse.create_pod, result.create_pod, status_of(result).recoveries) == (None, None, [])
    assert (status_of(result).attempt, status_of(result).budgets) == (1, budgets)


def test_silence_for_ever_is_told_and_left_to_the_kubelet() -> None:
    """A pod that does not answer the operator may serve others: its probe restarts it, and the deadline says so."""
    told = serving()
    for seconds, phase in ((60, "Recovering"), (2000, "Failed")):
        silent = Trainer(report=report(), unreachable_since=NOW, problem="ConnectTimeout")
        told = replace(told, now=NOW + timedelta(seconds=seconds), trainer=silent)
        result = decided(told)
        assert (status_of(result).phase, result.create_pod, result.delete_pods) == (phase, None, ())
        assert "ConnectTimeout" in condition(result, "Serving")[2]
        told = after(told, result)


def test_restarted_operator_believes_the_status_until_it_has_asked() -> None:
    """Before the first answer nothing that only the trainer can say is taken back: a restart writes nothing."""
    sick = serving(trainer=Trainer(report=report(storage={"error": "no space left"})))
    known = after(sick, decided(sick))
    for trainer in (Trainer(), Trainer(unreachable_since=ago(1), problem="ConnectTimeout")):
        assert status_of(decided(replace(known, trainer=trainer))) == known.session.status


def test_new_pod_does_not_inherit_serving() -> None:
    """What was true of the old pod is not assumed of the new one."""
    before = serving()
    result = decided(replace(before, pods=(pod(uid="another"),), trainer=Trainer()))
    assert condition(result, "Serving")[0] == "False"


def test_transition_time_moves_with_the_status_only() -> None:
    """Another reason or message is not a transition."""
    old = Condition.model_validate(
        {"type": "Ready", "status": "False", "reason": "Starting", "lastTransitionTime": text(ago(60))}
    )
    for aspect, moved in ((Aspect(False, "Recovering", "m"), False), (Aspect(True, "Serving"), True)):
        [new] = update([old], {"Ready": aspect}, generation=2, now=NOW)
        assert (new.last_transition_time != old.last_transition_time) is moved
        assert new.observed_generation == 2


def test_base_model_is_ready_once_an_engine_has_it() -> None:
    """Hash and revision go to the status; the condition waits for an engine that has loaded the model."""
    loading: dict[str, Any] = {"engine": {"pid": None}}
    result = decided(replace(STARTING, trainer=Trainer(report=report(1, "Starting", **loading))))
    assert condition(result, "BaseModelReady")[:2] == ("False", "BaseModelLoading")
    result = decided(serving())
    assert condition(result, "BaseModelReady")[:2] == ("True", "BaseModelLoaded")
    base_model = status_of(result).base_model
    assert base_model is not None
    assert base_model.manifest_sha256 == "ab" * 32
