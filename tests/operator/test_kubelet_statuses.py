"""Pods as kubelets and schedulers leave them in the API server, from the raw status to the class of the failure.

Shapes, reasons and words are those of Kubernetes 1.36: `rejectPod` and `admissionRejectionReasons` in
pkg/kubelet/kubelet.go, pkg/kubelet/lifecycle, nodeshutdown, eviction, preemption and status (which holds the condition
DisruptionTarget back until all containers have ended), pkg/scheduler/framework/preemption and the taint-eviction and
pod garbage collector controllers.
"""

from __future__ import annotations

from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.core import children
from everloop_operator.core.observed import Pod, Trainer
from everloop_operator.core.projections import pod_of
from tests.operator.builders import ago, decided, node, report, serving, spec, status_of, text

Status = dict[str, Any]


def read(status: Status, **metadata: Any) -> Pod:
    """The pod of attempt 1 with this status, as the API server tells it."""
    found = pod_of(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "tuned-a1-0",
                "namespace": "team",
                "uid": "uid-pod-1",
                "creationTimestamp": text(ago(100)),
                "labels": {names.LABEL_ATTEMPT: "1"},
                "annotations": {names.ANNOTATION_TEMPLATE_HASH: children.template_hash(spec())},
                **metadata,
            },
            "spec": {"nodeName": "node-a", "containers": [{"name": names.TRAINER_CONTAINER}]},
            "status": status,
        }
    )
    assert found is not None
    return found


def conditions(*, disrupted: tuple[str, str] | None = None, ready: bool = False) -> list[dict[str, Any]]:
    """Those of a pod that was scheduled."""
    state = "True" if ready else "False"
    listed = [
        {"type": "PodReadyToStartContainers", "status": state, "lastTransitionTime": text(ago(2))},
        {"type": "Initialized", "status": "True", "lastTransitionTime": text(ago(89))},
        {"type": "Ready", "status": state, "lastTransitionTime": text(ago(2))},
        {"type": "ContainersReady", "status": state, "lastTransitionTime": text(ago(2))},
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": text(ago(90))},
    ]
    if disrupted:
        reason, message = disrupted
        told = {"status": "True", "reason": reason, "message": message, "lastTransitionTime": text(ago(1))}
        listed.append({"type": "DisruptionTarget", **told})
    return listed


def container(state: dict[str, Any], restarts: int = 0, **more: Any) -> dict[str, Any]:
    """The trainer's entry in `containerStatuses`."""
    return {
        "name": names.TRAINER_CONTAINER,
        "image": "registry/trainer:1",
        "imageID": "registry/trainer@sha256:" + "ab" * 32,
        "containerID": "containerd://" + "cd" * 32,
        "ready": "running" in state,
        "started": "running" in state,
        "restartCount": restarts,
        "state": state,
        "lastState": {},
        **more,
    }


def terminated(code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    """How a container has ended a second ago."""
    times = {"startedAt": text(ago(80)), "finishedAt": text(ago(1))}
    return {"terminated": {"exitCode": code, "reason": reason, **times, **more}}


def rejected(reason: str, message: str) -> Status:
    """What a kubelet writes of a pod that it does not admit, and all of it but what the API server knows."""
    return {"phase": "Failed", "reason": reason, "message": f"Pod was rejected: {message}"}


def ended(reason: str, message: str, words: str = "", code: int = 143) -> Status:
    """What a kubelet writes of a pod that it has killed for a reason of its own."""
    return {
        "phase": "Failed",
        "reason": reason,
        "message": message,
        "conditions": conditions(disrupted=("TerminationByKubelet", words or message)),
        "containerStatuses": [container(terminated(code))],
    }


def disrupted(reason: str, message: str) -> Status:
    """A pod that still runs, and that somebody else is about to remove."""
    running = container({"running": {"startedAt": text(ago(80))}})
    return {"phase": "Running", "conditions": conditions(disrupted=(reason, message)), "containerStatuses": [running]}


SHUTTING_DOWN = "Pod was terminated in response to imminent node shutdown."
REJECTIONS = {
    "UnexpectedAdmissionError": "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu."
    " Requested: 1, Available: 0, which is unexpected",
    "OutOfcpu": "Node didn't have enough resource: cpu, requested: 4000, used: 6000, capacity: 8000",
    "OutOfmemory": "Node didn't have enough resource: memory, requested: 8, used: 6, capacity: 8",
    "OutOfephemeral-storage": "Node didn't have enough resource: ephemeral-storage, requested: 8, used: 6, capacity: 8",
    "OutOfpods": "Node didn't have enough resource: pods, requested: 1, used: 110, capacity: 110",
    "OutOfnvidia.com/gpu": "Node didn't have enough resource: nvidia.com/gpu, requested: 1, used: 8, capacity: 8",
    "TopologyAffinityError": "Resources cannot be allocated with Topology locality",
    "NodeAffinity": "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
    "NodePorts": "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports",
    "node(s) had taints that the pod didn't tolerate": "Predicate TaintToleration failed",
    "AppArmor": "Cannot enforce AppArmor: AppArmor is not enabled on the host",
    "InvalidNodeInfo": "Kubelet cannot get node info.",
    "InitContainerRestartPolicyForbidden": "init container may not have a non-default restartPolicy",
    "SupplementalGroupsPolicyNotSupported": "SupplementalGroupsPolicy=Strict is not supported in this node",
    "PodFeatureUnsupported": "this feature is not supported on this node",
    "PodLevelResourcesNotSupported": "pod level resources are not supported on this node",
    "PodOSNotSupported": "Failed to admit pod as the OS field doesn't match node OS",
    "PodOSSelectorNodeLabelDoesNotMatch": "Failed to admit pod as the `kubernetes.io/os` label doesn't match",
    "SysctlForbidden": 'forbidden sysctl: "net.core.somaxconn" not allowlisted',
    "UnexpectedPredicateFailureType": "GeneralPredicates failed due to an error, which is unexpected.",
    "UnknownReason": "GeneralPredicates failed due to unknown reason, which is unexpected.",
    "VolumeAttachmentLimitExceeded": "attachment limit of the node is exceeded",
    "AReasonOfALaterKubelet": "words",
}
"""The reason -> the words that follow it."""

ENDINGS: dict[str, tuple[Status, str]] = {
    **{f"rejected: {reason}": (rejected(reason, words), "PodRejected") for reason, words in REJECTIONS.items()},
    "rejected by a kubelet before 1.27": (
        {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod Node didn't have enough resource: cpu"},
        "PodRejected",
    ),
    "rejected by a node under pressure": (rejected("Evicted", "The node had condition: [MemoryPressure]. "), "Evicted"),
    "rejected by a node that shuts down": (
        rejected("NodeShutdown", "Pod was rejected as the node is shutting down."),
        "NodeShutdown",
    ),
    "killed by a node that shuts down": (ended("Terminated", SHUTTING_DOWN), "NodeShutdown"),
    "evicted under pressure": (
        ended("Evicted", "The node was low on resource: memory. Threshold quantity: 100Mi, available: 53Mi. "),
        "Evicted",
    ),
    "evicted for its own disk": (
        ended("Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ", code=137),
        "Evicted",
    ),
    "preempted by a critical pod": (
        ended(
            "Preempting",
            "Preempted in order to admit critical pod",
            "Pod was preempted by Kubelet to accommodate a critical pod.",
        ),
        "Preempted",
    ),
    "preempted by the scheduler": (
        disrupted("PreemptionByScheduler", "default-scheduler: preempting to accommodate a higher priority pod"),
        "Preempted",
    ),
    "drained": (disrupted("EvictionByEvictionAPI", "Eviction API: evicting"), "Drained"),
    "evicted by a taint": (
        disrupted("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"),
        "PodDisrupted",
    ),
    "collected with its node": (
        {
            **disrupted("DeletionByPodGC", "PodGC: node no longer exists"),
            "phase": "Failed",
        },
        "PodDisrupted",
    ),
    "past its own deadline": (
        {
            "phase": "Failed",
            "reason": "DeadlineExceeded",
            "message": "Pod was active on the node longer than the specified deadline",
            "conditions": conditions(),
            "containerStatuses": [container(terminated(137))],
        },
        "PodFailed",
    ),
}


@pytest.mark.parametrize(("status", "reason"), ENDINGS.values(), ids=ENDINGS)
def test_a_pod_that_its_kubelet_ended_is_of_this_class(status: Status, reason: str) -> None:
    """The next attempt is under way or its time known, and the recovery says the class and the kubelet's own words."""
    result = decided(serving(pods=(read(status),)))
    entry = status_of(result).recoveries[-1]
    assert entry.reason == reason
    assert result.create_pod is not None or result.requeue_after is not None
    if "message" in status:
        assert any(status["message"].strip() in event.message for event in result.events)


CONTAINERS: dict[str, tuple[dict[str, Any], str, int]] = {
    "killed for its memory, and started again": (
        container({"running": {"startedAt": text(ago(0))}}, 1, lastState=terminated(137, "OOMKilled")),
        "OutOfMemory",
        137,
    ),
    "killed for its memory, and waiting": (
        container(
            {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}},
            1,
            lastState=terminated(137, "OOMKilled"),
        ),
        "OutOfMemory",
        137,
    ),
    "killed for its memory just now": (container(terminated(137, "OOMKilled")), "OutOfMemory", 137),
    "ended by its liveness probe": (container(terminated(137)), "Killed", 137),
    "of an image without the command": (
        container(
            terminated(
                128,
                "StartError",
                message="failed to create containerd task: exec: no such file or directory: unknown",
            )
        ),
        "StartFailed",
        128,
    ),
}


@pytest.mark.parametrize(("entry", "reason", "code"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_that_ended_is_of_this_class(entry: dict[str, Any], reason: str, code: int) -> None:
    """Its pod is kept."""
    status = {"phase": "Running", "conditions": conditions(), "containerStatuses": [entry]}
    result = decided(serving(pods=(read(status),), trainer=Trainer(report=report(1, "Recovering"))))
    failure = status_of(result).failure
    assert failure is not None
    assert (failure.reason, failure.exit_code) == (reason, code)
    assert (result.create_pod, result.delete_pods) == (None, ())


def test_a_broken_accelerator_leaves_its_node() -> None:
    """The trainer's last words are those that its kubelet read from the termination log."""
    words = "AcceleratorFailed: CUDA error: uncorrectable ECC error encountered"
    entry = container(terminated(names.EXIT_ACCELERATOR_FAILED, message=words + "\n"))
    status = {"phase": "Running", "conditions": conditions(), "containerStatuses": [entry]}
    nodes = {"node-a": node(), "node-b": node("node-b")}
    result = decided(serving(pods=(read(status),), nodes=nodes))
    assert status_of(result).recoveries[-1].reason == "AcceleratorFailed"
    assert any(words in event.message for event in result.events)
    assert result.create_pod is not None
    assert "node-a" in str(result.create_pod["spec"]["affinity"])
