"""The classes of failures: what each is recognised by, which budget it uses, and what a person is told."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.training_session_status import TrainingSessionStatus
from everloop_operator.core import failures
from everloop_operator.core.failure_classes import CLASSES, IN_POD, REPLACED, WAITING
from everloop_operator.core.observed import Claim, Container, Notice, Observed, Pod, Trainer
from tests.operator.builders import (
    CLAIMS,
    NOW,
    after,
    ago,
    condition,
    decided,
    lost,
    node,
    observed,
    pending,
    pod,
    report,
    serving,
    session,
    status_of,
)

BUSY = Trainer(report=report(1, "Recovering"))


def exited(code: int, reason: str = "Error", message: str = "", seconds: float = 1, **changes: Any) -> Container:
    return Container(exit_code=code, exit_reason=reason, exit_message=message, finished=ago(seconds), **changes)


ECC = exited(67, message="AcceleratorFailed: CUDA error: uncorrectable ECC error encountered")
FENCED = exited(64, message="Fenced: superseded")

# --- another attempt takes over -------------------------------------------------------------------------------------

ENDED: list[tuple[str, dict[str, Any], str]] = [
    ("node not Ready", {"nodes": {"node-a": lost()}}, "NodeLost"),
    ("node gone", {"nodes": {}}, "NodeGone"),
    ("pod gone", {"pods": ()}, "PodLost"),
    ("pod deleted", {"pods": (pod(deletion_requested=ago(1)),)}, "PodDeleted"),
    ("evicted by its kubelet", {"pods": (pod(phase="Failed", failure="Evicted: node low on memory"),)}, "Evicted"),
    ("preempted", {"pods": (pod(disruption="PreemptionByScheduler"),)}, "Preempted"),
    (
        "preempted, and going",
        {"pods": (pod(disruption="PreemptionByScheduler", deletion_requested=ago(1)),)},
        "Preempted",
    ),
    ("preempted, and gone", {"pods": (pod(phase="Failed", disruption="PreemptionByScheduler"),)}, "Preempted"),
    ("preempted by a critical pod", {"pods": (pod(phase="Failed", failure="Preempting: Preempted"),)}, "Preempted"),
    ("drained", {"pods": (pod(disruption="EvictionByEvictionAPI", deletion_requested=ago(1)),)}, "Drained"),
    (
        "node shuts down",
        {"pods": (pod(phase="Failed", failure="Terminated: in response to imminent node shutdown"),)},
        "NodeShutdown",
    ),
    ("node shuts down, and says so before", {"pods": (pod(disruption="TerminationByKubelet"),)}, "NodeShutdown"),
    (
        "rejected by a node that shuts down",
        {"pods": (pod(phase="Failed", failure="NodeShutdown: Pod was rejected as the node is shutting down."),)},
        "NodeShutdown",
    ),
    ("evicted by a taint", {"pods": (pod(disruption="DeletionByTaintManager"),)}, "PodDisrupted"),
    ("collected", {"pods": (pod(disruption="DeletionByPodGC"),)}, "PodDisrupted"),
    ("disrupted in a new way", {"pods": (pod(disruption="SomethingNew"),)}, "PodDisrupted"),
    *(
        (f"not admitted: {reason}", {"pods": (pod(phase="Failed", failure=f"{reason}: words"),)}, "PodRejected")
        for reason in (
            "UnexpectedAdmissionError", "OutOfcpu", "OutOfmemory", "OutOfnvidia.com/gpu",
            "NodeAffinity", "NodePorts", "TopologyAffinityError", "InvalidNodeInfo",
        )
    ),
    ("broken accelerator", {"pods": (pod(ready=False, container=ECC),)}, "AcceleratorFailed"),
    ("fenced", {"pods": (pod(ready=False, container=FENCED),)}, "Fenced"),
    ("failed otherwise", {"pods": (pod(phase="Failed", failure="DeadlineExceeded: words"),)}, "PodFailed"),
    ("failed without a word", {"pods": (pod(phase="Failed"),)}, "PodFailed"),
    ("succeeded", {"pods": (pod(phase="Succeeded"),)}, "PodFailed"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), [row[1:] for row in ENDED], ids=[row[0] for row in ENDED])
def test_how_an_attempt_ends(change: dict[str, Any], reason: str) -> None:
    """Another pod at once, the class in status and event, and the budget that the table says."""
    result = decided(serving(**change))
    status = status_of(result)
    assert result.create_pod is not None
    assert status.recoveries[-1].reason == reason
    assert status.budgets is not None
    used = (status.budgets.infrastructure.used, status.budgets.application.used)
    assert used == {"none": (0, 0), "infrastructure": (1, 0), "application": (0, 1)}[CLASSES[reason].budget]
    assert result.events[0].type == ("Normal" if CLASSES[reason].budget == "none" else "Warning")


def test_every_class_of_replacement_is_tried_here() -> None:
    """A class without a row above would be one that nothing leads to."""
    others = {names.RECOVERY_NODE_HEALTH, names.RECOVERY_NO_PROGRESS}
    assert {row[2] for row in ENDED} | others == {row.reason for row in REPLACED}
    assert {row[2] for row in EXITS} == {row.reason for row in IN_POD}
    assert {row.reason for row in WAITING} <= {
        value for name, value in vars(names).items() if name.startswith("REASON_")
    }


@pytest.mark.parametrize("reason", sorted({row.reason for row in REPLACED if row.shuns_node} - {"NodeHealth"}))
def test_nodes_that_failed_are_avoided(reason: str) -> None:
    """By the next pod of this session, and by those after it for recovery.avoidSeconds."""
    change = next((change for _, change, found in ENDED if found == reason), None)
    assert change is not None
    result = decided(serving(**{"nodes": {"node-a": node(), "node-b": node("node-b")}, **change}))
    assert result.create_pod is not None
    assert "node-a" in str(result.create_pod["spec"]["affinity"])


def test_one_operation_may_not_run_for_ever() -> None:
    """Beyond deadlines.progressSeconds another pod runs it again: by name, from the application budget."""
    underway: dict[str, Any] = {"underway": {"operation": "s:train:0:7", "deaths": 0}}
    stuck = serving(trainer=Trainer(report=report(**underway), running_since=ago(1800)))
    result = decided(stuck)
    entry = status_of(result).recoveries[-1]
    assert (entry.reason, result.events[0].message.partition(" has run")[0]) == ("NoProgress", "s:train:0:7")
    budgets = status_of(result).budgets
    assert budgets is not None
    assert (budgets.infrastructure.used, budgets.application.used) == (0, 1)
    early = decided(serving(trainer=Trainer(report=report(**underway), running_since=ago(1700))))
    assert early.create_pod is None
    assert early.requeue_after == pytest.approx(100)
    silent = decided(replace(stuck, trainer=replace(stuck.trainer, unreachable_since=ago(1))))
    assert silent.create_pod is None


# --- the container ended, the pod stays -----------------------------------------------------------------------------

EXITS: list[tuple[str, Container, str]] = [
    ("out of memory", exited(137, "OOMKilled"), "OutOfMemory"),
    ("out of memory again", exited(137, "OOMKilled"), "OutOfMemoryAgain"),
    ("bad configuration", exited(78), "BadConfiguration"),
    ("storage of another model", exited(65), "StorageMismatch"),
    ("storage failed", exited(66), "StorageFailed"),
    ("no such command", exited(127), "StartFailed"),
    ("did not start", exited(128, "StartError"), "StartFailed"),
    ("killed", exited(137), "Killed"),
    ("ended by its probe", exited(143), "Killed"),
    ("crashed", exited(1, message="Traceback"), "Crashed"),
]


def crashed(container: Container, operation: str = "", state: str = "Recovering") -> Observed:
    """A session whose container has ended while this operation ran, and whose next server says so."""
    underway = {"operation": operation, "deaths": 1} if operation else None
    first = serving(pods=(pod(ready=False, container=container),))
    return replace(first, trainer=Trainer(report=report(1, state, underway=underway)))


def once_before(observation: Observed, operation: str) -> Observed:
    """The same, after memory has run out at this operation before."""
    earlier = replace(crashed(exited(137, "OOMKilled", seconds=60), operation), session=observation.session)
    return replace(observation, session=replace(observation.session, status=status_of(decided(earlier))))


@pytest.mark.parametrize(("container", "reason"), [row[1:] for row in EXITS], ids=[row[0] for row in EXITS])
def test_how_a_container_ends(container: Container, reason: str) -> None:
    """The pod is kept; status and event name class, exit code, last words and remedy, once."""
    broken = crashed(container, "m:7")
    if reason == "OutOfMemoryAgain":
        broken = once_before(broken, "m:7")
    result = decided(broken)
    assert (result.create_pod, result.delete_pods) == (None, ())
    failure = status_of(result).failure
    assert failure is not None
    assert (failure.reason, failure.exit_code, failure.operation) == (reason, container.exit_code, "m:7")
    assert failure.remedy == CLASSES[reason].remedy
    budgets = status_of(result).budgets
    assert budgets is not None
    kind = CLASSES[reason].budget
    earlier = int(reason == "OutOfMemoryAgain")
    assert budgets.infrastructure.used == earlier + int(kind == "infrastructure")
    assert budgets.application.used == int(kind == "application")
    told = [event for event in result.events if event.reason == "ContainerFailed"]
    assert [event.message.partition(":")[0] for event in told] == [reason]
    again = decided(after(broken, result))
    assert status_of(again).budgets == budgets
    assert [event for event in again.events if event.reason == "ContainerFailed"] == []


def test_memory_that_runs_out_at_another_operation_is_no_repetition() -> None:
    """Only the same operation twice says that it is too large."""
    for before, now, reason in (
        ("m:7", "m:8", "OutOfMemory"),
        ("", "", "OutOfMemory"),
        ("m:7", "m:7", "OutOfMemoryAgain"),
    ):
        result = decided(once_before(crashed(exited(137, "OOMKilled"), now), before))
        failure = status_of(result).failure
        assert failure is not None
        assert failure.reason == reason


def test_the_operation_may_become_known_later() -> None:
    """The container has ended before its next server can say what it died of: the same failure, not another one."""
    silent = replace(crashed(exited(137, "OOMKilled")), trainer=Trainer(report=report()))
    first = decided(silent)
    later = after(silent, first, trainer=crashed(exited(137, "OOMKilled"), "m:7").trainer)
    failure = status_of(decided(later)).failure
    assert failure is not None
    assert failure.operation == "m:7"
    assert [event for event in decided(later).events if event.reason == "ContainerFailed"] == []


def test_a_container_that_ended_well_is_no_failure() -> None:
    """Nor is one whose pod is replaced for it: that is a recovery."""
    for container in (exited(0), Container(), FENCED, ECC):
        assert failures.of_container(container, "", None) == ""


def test_crashes_use_the_application_budget_up() -> None:
    """Three an hour by default; the fourth is Failed with cause and remedy, and an hour later that is forgotten."""
    observation = serving()
    for number, seconds in enumerate((400, 300, 200, 100), 1):
        container = exited(1, message="Traceback", seconds=seconds, restarts=0)
        now = ago(seconds - 1)
        broken: dict[str, Any] = {"pods": (pod(ready=False, container=container),), "trainer": BUSY}
        observation = replace(observation, now=now, **broken)
        result = decided(observation)
        phase, observation = status_of(result).phase, after(observation, result)
        assert (phase == "Failed") is (number == 4)
    reason, words = condition(result, "Stalled")[1:]
    assert reason == "BudgetExhausted"
    assert "spec.recovery.application" in words
    assert "exit code 1: Traceback (Crashed); read the log of the pod" in words
    assert result.delete_pods == ()
    assert result.requeue_after is not None
    assert 0 < result.requeue_after <= 3301
    served = decided(replace(observation, trainer=Trainer(report=report()), pods=(pod(),)))
    assert status_of(served).phase == "Running"
    later = observation.now + timedelta(seconds=3302)
    assert condition(decided(replace(observation, now=later)), "Stalled")[1] == "StartupDeadlineExceeded"


# --- something is waited for ----------------------------------------------------------------------------------------

SCHEDULER: list[tuple[str, str]] = [
    (
        "0/4 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
        "3 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available: 4 Preemption is not helpful.",
        "missing: had untolerated taint {node-role.kubernetes.io/control-plane: } (on 1 of 4 nodes); "
        "nvidia.com/gpu (on 3 of 4 nodes)",
    ),
    (
        "0/2 nodes are available: 1 Insufficient cpu, 2 Insufficient memory.",
        "missing: cpu (on 1 of 2 nodes); memory (on 2 of 2 nodes)",
    ),
    (
        "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
        "missing: didn't match Pod's node affinity/selector (on 1 of 1 nodes)",
    ),
    ('0/3 nodes are available: persistentvolumeclaim "training" not found.', ""),
    ("no nodes available to schedule pods", ""),
    ("", ""),
]


@pytest.mark.parametrize(("message", "lacking"), SCHEDULER)
def test_what_the_scheduler_lacks(message: str, lacking: str) -> None:
    """By resource or constraint, and on how many nodes; what is not understood is quoted as it is."""
    assert failures.shortage(message) == lacking


def waiting_pod(reason: str, message: str) -> Pod:
    container = Container(waiting_reason=reason, waiting_message=message)
    return pod(ready=False, scheduled=ago(1801), container=container)


FIRST = TrainingSessionStatus(attempt=1)
DEADLINES: list[tuple[str, Pod, str, tuple[str, str]]] = [
    (
        "no node",
        pending(unschedulable_since=ago(3601), unschedulable_message=SCHEDULER[0][0]),
        "UnschedulableDeadlineExceeded",
        ("nvidia.com/gpu (on 3 of 4 nodes)", "make room"),
    ),
    (
        "no image",
        waiting_pod("ImagePullBackOff", "no such image"),
        "StartupDeadlineExceeded",
        ("ImagePullBackOff: no such image", "spec.pod.imagePullSecrets"),
    ),
    (
        "no secret",
        waiting_pod("CreateContainerConfigError", 'secret "hub" not found'),
        "StartupDeadlineExceeded",
        ('secret "hub" not found', "Secrets and ConfigMaps that spec.pod names"),
    ),
]


STUCK = pending(node="node-a", scheduled=ago(1801))
UNBOUND = pending(unschedulable_since=ago(3601), unschedulable_message="unbound immediate PersistentVolumeClaims")
CLAIM = Claim("training", "u", "Pending", frozenset({"ReadWriteMany"}))
VOLUMES: list[tuple[str, Observed, str, tuple[str, ...]]] = [
    (
        "a mount that fails",
        observed(pods=(STUCK,), notices={f"Pod/{STUCK.name}": Notice("FailedMount", "file system is FAILED", ago(5))}),
        "StartupDeadlineExceeded",
        ("did not serve within 1800 s", "FailedMount: file system is FAILED", "look at the volume and its driver"),
    ),
    (
        "a claim that does not bind",
        observed(
            pods=(UNBOUND,),
            claims={**CLAIMS, "training": CLAIM},
            notices={"PersistentVolumeClaim/training": Notice("ProvisioningFailed", "no free addresses", ago(5))},
        ),
        "UnschedulableDeadlineExceeded",
        ("unbound immediate", '"training"', "ProvisioningFailed: no free addresses"),
    ),
]


@pytest.mark.parametrize(("waits", "reason", "words"), [row[1:] for row in VOLUMES], ids=[row[0] for row in VOLUMES])
def test_a_deadline_names_the_volume_that_is_waited_for(waits: Observed, reason: str, words: tuple[str, ...]) -> None:
    """A pod without its volumes is Failed in time, and the words of volume and claim are with the condition."""
    result = decided(replace(waits, session=session(FIRST)))
    assert (status_of(result).phase, condition(result, "Stalled")[1]) == ("Failed", reason)
    for each in words:
        assert each in condition(result, "Stalled")[2]


@pytest.mark.parametrize(
    ("waits", "reason", "words"), [row[1:] for row in DEADLINES], ids=[row[0] for row in DEADLINES]
)
def test_deadlines_name_cause_and_remedy(waits: Pod, reason: str, words: tuple[str, str]) -> None:
    """What a person needs is in the condition, without a look at the pod."""
    result = decided(observed(session=session(FIRST), pods=(waits,)))
    assert condition(result, "Stalled")[1] == reason
    for each in words:
        assert each in condition(result, "Stalled")[2]


def test_full_storage_keeps_the_pod() -> None:
    """Nothing is replaced for it: the next pod would find it as full."""
    full = serving(trainer=Trainer(report=report(storage={"error": "ENOSPC: no space left on device"})))
    result = decided(full)
    assert (result.create_pod, result.delete_pods) == (None, ())
    assert condition(result, "VolumesReady")[1] == names.REASON_STORAGE_ERROR
    assert full.now == NOW
