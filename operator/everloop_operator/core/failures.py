"""What ended: a pod or a container, by its kubelet's words -> a class of `failure_classes`."""

from __future__ import annotations

import re

from everloop_operator.api import names
from everloop_operator.api.training_session_status import FailureStatus

from .failure_classes import CLASSES, FailureClass
from .observed import Container, Observed, Pod
from .projections import format_time

EXITS = {
    names.EXIT_STORAGE_MISMATCH: names.REASON_STORAGE_MISMATCH,
    names.EXIT_STORAGE_FAILED: names.FAILURE_STORAGE_FAILED,
    names.EXIT_BAD_CONFIGURATION: names.FAILURE_BAD_CONFIGURATION,
}
DISRUPTIONS = {
    "PreemptionByScheduler": names.RECOVERY_PREEMPTED,
    "EvictionByEvictionAPI": names.RECOVERY_DRAINED,
    "TerminationByKubelet": names.RECOVERY_NODE_SHUTDOWN,
}
ENDINGS = {
    "Evicted": names.RECOVERY_EVICTED,
    "Preempting": names.RECOVERY_PREEMPTED,
    "Terminated": names.RECOVERY_NODE_SHUTDOWN,
    "NodeShutdown": names.RECOVERY_NODE_SHUTDOWN,
    "Shutdown": names.RECOVERY_NODE_SHUTDOWN,
}
REJECTIONS = re.compile(
    r"UnexpectedAdmissionError|OutOf\S+|NodeAffinity|NodeName|NodePorts|TopologyAffinityError|"
    r"InvalidNodeInfo|\w*AdmissionError|PodOSNotSupported|PodOSSelectorNodeLabelDoesNotMatch|SysctlForbidden|AppArmor"
)
"""Reasons of a pod that its kubelet did not admit; other kubelets have others."""
REJECTED = "Pod was rejected: "
"""Before the words of a kubelet that did not admit a pod, whatever the reason (Kubernetes, `Kubelet.rejectPod`)."""
FINAL_EXITS = {
    names.EXIT_FENCED: names.RECOVERY_FENCED,
    names.EXIT_ACCELERATOR_FAILED: names.RECOVERY_ACCELERATOR_FAILED,
}
"""Exit codes after which only another pod can help."""


def of_pod(pod: Pod) -> str:
    """The class of a pod that has ended: what its kubelet says, and else what was about to disrupt it."""
    reason, _, message = pod.failure.partition(": ")
    if reason in ENDINGS:
        return ENDINGS[reason]
    if pod.disruption:
        return of_disruption(pod)
    if message.startswith(REJECTED) or REJECTIONS.fullmatch(reason):
        return names.RECOVERY_POD_REJECTED
    return names.RECOVERY_POD_FAILED


def of_disruption(pod: Pod) -> str:
    """The class of a pod that is about to be disrupted."""
    return DISRUPTIONS.get(pod.disruption, names.RECOVERY_DISRUPTED)


def of_container(container: Container, operation: str, previous: FailureStatus | None) -> str:
    """The class of a container that has ended; '' if it ended well, or if another pod takes over for it."""
    code = container.exit_code
    if code in (None, 0) or code in FINAL_EXITS:
        return ""
    if container.exit_reason == "OOMKilled":
        memory = (names.FAILURE_OUT_OF_MEMORY, names.FAILURE_OUT_OF_MEMORY_AGAIN)
        again = previous is not None and previous.reason in memory and operation and previous.operation == operation
        return memory[1] if again else memory[0]
    if code in EXITS:
        return EXITS[code]
    if container.exit_reason in ("StartError", "ContainerCannotRun") or code in (126, 127, 128):
        return names.FAILURE_START_FAILED
    return names.FAILURE_KILLED if code > 128 else names.FAILURE_CRASHED


def latest(observed: Observed, pod: Pod | None) -> tuple[FailureStatus | None, FailureClass | None]:
    """The last failure of a container as the status is to have it, and its class if it is a new one.

    The operation in which it happened may become known later, when the next server has read the journal.
    """
    before = observed.session.status.failure
    container = pod.container if pod else Container()
    if pod is None or container.finished is None:
        return before, None
    report = observed.trainer.report
    operation = report.underway.operation if report and report.underway else ""
    time = format_time(container.finished)
    if before and (before.pod_uid, before.time) == (pod.uid, time):
        told = before.operation or (operation if report and report.underway and report.underway.deaths else "")
        return (before if told == before.operation else before.model_copy(update={"operation": told})), None
    reason = of_container(container, operation, before)
    if not reason:
        return before, None
    found = CLASSES[reason]
    said = container.exit_message[-600:] or container.exit_reason or "no message"
    message = f"pod {pod.name}: the trainer ended with exit code {container.exit_code}: {said}"
    failure = FailureStatus(
        reason=reason,
        message=message,
        remedy=found.remedy,
        exit_code=container.exit_code,
        operation=operation,
        pod_uid=pod.uid,
        time=time,
    )
    return failure, found


def shortage(message: str) -> str:
    """What the scheduler lacks, from its message: the resource or the constraint, and on how many nodes; '' if unclear.

    `0/4 nodes are available: 3 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint {a: b}. preemption: ...`
    """
    told = re.match(r"0/(\d+) nodes are available: (.*?)(?:\. preemption:|\.?$)", message, re.DOTALL)
    if told is None:
        return ""
    total, parts = told.group(1), re.split(r", (?=\d+ )", told.group(2))
    found = []
    for part in parts:
        counted = re.fullmatch(r"(\d+) (?:node\(s\) )?(.+)", part.strip())
        if counted is None:
            continue
        count, what = counted.groups()
        found.append(f"{what.removeprefix('Insufficient ')} (on {count} of {total} nodes)")
    return "missing: " + "; ".join(found) if found else ""
