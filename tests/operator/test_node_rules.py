"""What the rules of the chart's profiles find at nodes, and when it counts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from everloop_operator.core import node_rules
from everloop_operator.core.node_rules import NodeRule, Severity
from everloop_operator.core.projections import node_of
from tests.operator.builders import NOW

PROFILES = Path(__file__).resolve().parents[2] / "helm" / "everloop" / "profiles"
Body = dict[str, Any]


def profile(name: str) -> tuple[NodeRule, ...]:
    return tuple(NodeRule.model_validate(rule) for rule in yaml.safe_load((PROFILES / f"{name}.yaml").read_text()))


EVERY_RULE = tuple(rule for path in sorted(PROFILES.glob("*.yaml")) for rule in profile(path.stem))


def raw(
    labels: Body | None = None,
    taints: list[Body] | None = None,
    conditions: list[Body] | None = None,
    devices: tuple[str, str, str] | None = None,
    **spec: Any,
) -> Body:
    """A Node as the API server shows it, with what every healthy node has too."""
    healthy = [
        {"type": kind, "status": "False", "reason": f"KubeletHasNo{kind}"}
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ]
    amounts = {"cpu": "96", "memory": "1056270340Ki", "pods": "110"}
    capacity, allocatable = dict(amounts), {**amounts, "cpu": "95690m", "memory": "1042466820Ki"}
    if devices:
        name, capacity[devices[0]], allocatable[devices[0]] = devices
        assert name in capacity
    return {
        "metadata": {
            "name": "node-a",
            "uid": "uid-node-a",
            "labels": {"kubernetes.io/hostname": "node-a", "kubernetes.io/os": "linux", **(labels or {})},
        },
        "spec": {"taints": taints or [], **spec},
        "status": {
            "capacity": capacity,
            "allocatable": allocatable,
            "conditions": [
                *healthy,
                {"type": "Ready", "status": "True", "reason": "KubeletReady"},
                *(conditions or []),
            ],
        },
    }


def condition(kind: str, status: str, reason: str = "", message: str = "") -> Body:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def taint(key: str, effect: str = "NoSchedule", value: str | None = None) -> Body:
    return {"key": key, "effect": effect} | ({"value": value} if value is not None else {})


HEALTH = "sagemaker.amazonaws.com/node-health-status"
DEEP = "sagemaker.amazonaws.com/deep-health-check-status"
STATE = "dgxc.nvidia.com/nvsentinel-state"
FINDINGS: list[tuple[str, Body, str, str]] = [
    (
        "kubernetes",
        raw(unschedulable=True, taints=[taint("node.kubernetes.io/unschedulable")]),
        "node-cordoned",
        "Avoid",
    ),
    ("kubernetes", raw(taints=[taint("node.kubernetes.io/disk-pressure")]), "node-under-pressure", "Avoid"),
    ("kubernetes", raw(taints=[taint("node.kubernetes.io/memory-pressure")]), "node-under-pressure", "Avoid"),
    (
        "kubernetes",
        raw(taints=[taint("node.kubernetes.io/network-unavailable")]),
        "node-network-unavailable",
        "Avoid",
    ),
    ("kubernetes", raw(taints=[taint("node.cloudprovider.kubernetes.io/shutdown")]), "node-shutdown", "MoveNow"),
    (
        "kubernetes",
        raw(taints=[taint("ToBeDeletedByClusterAutoscaler", value="1767225600")]),
        "node-to-be-deleted",
        "CheckpointThenMove",
    ),
    (
        "kubernetes",
        raw(taints=[taint("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule", "1767225600")]),
        "node-deletion-candidate",
        "Avoid",
    ),
    (
        "kubernetes",
        raw(conditions=[condition("MaintenancePlanned", "True")]),
        "node-maintenance-planned",
        "CheckpointThenMove",
    ),
    (
        "kubernetes",
        raw(conditions=[condition("MaintenanceInProgress", "True")]),
        "node-maintenance-in-progress",
        "CheckpointThenMove",
    ),
    (
        "kubernetes",
        raw(conditions=[condition("DrainInProgress", "True")]),
        "node-drain-in-progress",
        "CheckpointThenMove",
    ),
    ("kubernetes", raw(conditions=[condition("Drained", "True")]), "node-drained", "CheckpointThenMove"),
    (
        "kubernetes",
        raw(conditions=[condition("GracefulNodeShutdownInProgress", "True")]),
        "node-graceful-shutdown",
        "CheckpointThenMove",
    ),
    ("kubernetes", raw(devices=("nvidia.com/gpu", "8", "7")), "node-short-of-gpus", "Avoid"),
    ("kubernetes", raw(devices=("amd.com/gpu", "8", "6")), "node-short-of-gpus", "Avoid"),
    ("kubernetes", raw(devices=("aws.amazon.com/neuroncore", "32", "30")), "node-short-of-neuron-devices", "Avoid"),
    (
        "hyperpod",
        raw({HEALTH: "UnschedulablePendingReplacement"}),
        "hyperpod-pending-replacement",
        "CheckpointThenMove",
    ),
    ("hyperpod", raw({HEALTH: "UnschedulablePendingReboot"}), "hyperpod-pending-reboot", "CheckpointThenMove"),
    ("hyperpod", raw({HEALTH: "UnschedulablePendingSomethingNew"}), "hyperpod-pending-other", "CheckpointThenMove"),
    ("hyperpod", raw({HEALTH: "Unschedulable", DEEP: "InProgress"}), "hyperpod-deep-check-running", "Avoid"),
    ("hyperpod", raw({HEALTH: "Schedulable", DEEP: "Failed"}), "hyperpod-deep-check-failed", "CheckpointThenMove"),
    ("karpenter", raw(taints=[taint("karpenter.sh/disrupted")]), "karpenter-disrupted", "CheckpointThenMove"),
    (
        "eks",
        raw(conditions=[condition("AcceleratedHardwareReady", "False", "NvidiaXID79Error")]),
        "eks-accelerator",
        "CheckpointThenMove",
    ),
    ("eks", raw(conditions=[condition("NetworkingReady", "False", "IPAMDNotReady")]), "eks-networking", "Avoid"),
    ("eks", raw(conditions=[condition("StorageReady", "False", "EtcHostsMountFailed")]), "eks-storage", "Avoid"),
    ("eks", raw(conditions=[condition("KernelReady", "False", "ForkFailedOutOfPIDs")]), "eks-kernel", "Avoid"),
    (
        "eks",
        raw(conditions=[condition("ContainerRuntimeReady", "False", "PodStuckTerminating")]),
        "eks-container-runtime",
        "Avoid",
    ),
    (
        "gke",
        raw(taints=[taint("cloud.google.com/impending-node-termination")]),
        "gke-impending-termination",
        "CheckpointThenMove",
    ),
    (
        "gke",
        raw({"cloud.google.com/active-node-maintenance": "ONGOING"}),
        "gke-maintenance-ongoing",
        "CheckpointThenMove",
    ),
    (
        "gke",
        raw(taints=[taint("cloud.google.com/maintenance-window-started")]),
        "gke-maintenance-window",
        "CheckpointThenMove",
    ),
    ("gke", raw({"cloud.google.com/scheduled-maintenance-time": "1767225600"}), "gke-maintenance-scheduled", "Avoid"),
    ("aks", raw(conditions=[condition("GPUMissing", "True", "GPUMissing")]), "aks-gpu-missing", "CheckpointThenMove"),
    ("aks", raw(conditions=[condition("XIDErrors", "True", "XID79")]), "aks-xid", "CheckpointThenMove"),
    ("aks", raw(conditions=[condition("XIDError", "True")]), "aks-xid", "CheckpointThenMove"),
    ("aks", raw(conditions=[condition("NVLinkStatusInactive", "True")]), "aks-nvlink", "CheckpointThenMove"),
    ("aks", raw(conditions=[condition("IBLinkFlapping", "True")]), "aks-infiniband", "Avoid"),
    ("aks", raw(conditions=[condition("UnhealthyNvidiaDevicePlugin", "True")]), "aks-device-plugin", "Avoid"),
    ("aks", raw(conditions=[condition("UnhealthyNvidiaDCGMServices", "True")]), "aks-dcgm", "Avoid"),
    *(
        ("aks", raw(conditions=[condition(kind, "True", kind)]), rule, severity)
        for kind, rule, severity in (
            ("PreemptScheduled", "aks-preempt", "CheckpointThenMove"),
            ("PreemptionScheduled", "aks-preempt", "CheckpointThenMove"),
            ("TerminateScheduled", "aks-terminate", "CheckpointThenMove"),
            ("RedeployScheduled", "aks-redeploy", "CheckpointThenMove"),
            ("RebootScheduled", "aks-reboot", "CheckpointThenMove"),
            ("VMEventScheduled", "aks-vm-event", "CheckpointThenMove"),
            ("FreezeScheduled", "aks-freeze", "Avoid"),
        )
    ),
    *(
        ("nth", raw(taints=[taint(f"aws-node-termination-handler/{kind}", value="ec2-event")]), rule, severity)
        for kind, rule, severity in (
            ("spot-itn", "nth-spot-interruption", "CheckpointThenMove"),
            ("asg-lifecycle-termination", "nth-group-termination", "CheckpointThenMove"),
            ("scheduled-maintenance", "nth-scheduled-maintenance", "CheckpointThenMove"),
            ("rebalance-recommendation", "nth-rebalance", "Avoid"),
        )
    ),
    (
        "nth",
        raw({"aws-node-termination-handler/action": "UncordonAfterReboot"}),
        "nth-reboot",
        "CheckpointThenMove",
    ),
    ("npd", raw(conditions=[condition("KernelDeadlock", "True", "DockerHung")]), "npd-kernel-deadlock", "MoveNow"),
    (
        "npd",
        raw(conditions=[condition("ReadonlyFilesystem", "True", "FilesystemIsReadOnly")]),
        "npd-readonly-filesystem",
        "CheckpointThenMove",
    ),
    (
        "npd",
        raw(conditions=[condition("XfsShutdown", "True", "XfsHasShutdown")]),
        "npd-xfs-shutdown",
        "CheckpointThenMove",
    ),
    ("npd", raw(conditions=[condition("CperHardwareErrorFatal", "True")]), "npd-hardware-error", "CheckpointThenMove"),
    ("npd", raw(conditions=[condition("DiskBadBlock", "True")]), "npd-bad-block", "Avoid"),
    ("npd", raw(conditions=[condition("KubeletUnhealthy", "True")]), "npd-unhealthy-daemon", "Avoid"),
    ("npd", raw(conditions=[condition("ContainerRuntimeUnhealthy", "True")]), "npd-unhealthy-daemon", "Avoid"),
    ("npd", raw(conditions=[condition("FrequentKubeletRestart", "True")]), "npd-frequent-restart", "Avoid"),
    ("npd", raw(conditions=[condition("FrequentUnregisterNetDevice", "True")]), "npd-frequent-restart", "Avoid"),
    ("nvsentinel", raw({STATE: "quarantined"}), "nvsentinel-quarantined", "CheckpointThenMove"),
    ("nvsentinel", raw({STATE: "draining"}), "nvsentinel-leaving", "CheckpointThenMove"),
    ("nvsentinel", raw({STATE: "remediation-failed"}), "nvsentinel-leaving", "CheckpointThenMove"),
    (
        "nvsentinel",
        raw(conditions=[condition("SysLogsGPUFallenOff", "True")]),
        "nvsentinel-gpu-fallen-off",
        "CheckpointThenMove",
    ),
    ("nvsentinel", raw(conditions=[condition("SysLogsXIDError", "True")]), "nvsentinel-xid", "CheckpointThenMove"),
    ("nvsentinel", raw(conditions=[condition("SysLogsSXIDError", "True")]), "nvsentinel-sxid", "CheckpointThenMove"),
    (
        "nvsentinel",
        raw(conditions=[condition("NVSwitchFatalError", "True")]),
        "nvsentinel-nvswitch",
        "CheckpointThenMove",
    ),
    ("nvsentinel", raw(conditions=[condition("GpuThermalWatch", "True")]), "nvsentinel-gpu", "Avoid"),
    (
        "nvsentinel",
        raw(conditions=[condition("CSPMaintenance", "True")]),
        "nvsentinel-maintenance",
        "CheckpointThenMove",
    ),
]
HEALTHY: list[tuple[str, Body]] = [
    ("bare", raw()),
    ("hyperpod", raw({HEALTH: "Schedulable", DEEP: "Passed"})),
    (
        "eks",
        raw(
            conditions=[
                condition(f"{kind}Ready", "True")
                for kind in ("AcceleratedHardware", "Networking", "Storage", "Kernel", "ContainerRuntime")
            ]
        ),
    ),
    ("eks, not known", raw(conditions=[condition("AcceleratedHardwareReady", "Unknown")])),
    (
        "aks and npd",
        raw(
            conditions=[
                condition(kind, "False")
                for kind in (
                    "GPUMissing",
                    "XIDErrors",
                    "VMEventScheduled",
                    "KernelDeadlock",
                    "ReadonlyFilesystem",
                    "KubeletUnhealthy",
                    "FrequentKubeletRestart",
                )
            ]
        ),
    ),
    ("aks, events that can't be read", raw(conditions=[condition("VMEventScheduled", "Unknown")])),
    ("nth, done", raw({"aws-node-termination-handler/event-id": "ec2-event"})),
    ("nvsentinel, repaired", raw({STATE: "remediation-succeeded"})),
    ("devices", raw(devices=("nvidia.com/gpu", "8", "8"))),
    ("devices not registered", raw(devices=("nvidia.com/gpu", "0", "0"))),
    ("tainted for others", raw(taints=[taint("nvidia.com/gpu", value="present"), taint("team", value="vision")])),
]


@pytest.mark.parametrize(("name", "body", "rule", "severity"), FINDINGS, ids=[f"{row[0]}-{row[2]}" for row in FINDINGS])
def test_each_signal_of_a_platform_is_found(name: str, body: Body, rule: str, severity: str) -> None:
    """By its profile alone, with the rule and the severity that the documentation states."""
    found = node_rules.signals(body, profile(name), now=NOW)
    worst = node_rules.active(found, NOW + timedelta(days=1))
    assert worst is not None
    assert (worst.rule, worst.severity.value) == (rule, severity)
    assert {signal.rule for signal in found} <= {rule, "hyperpod-pending-other"}, "one cause is told once"


def test_every_rule_of_every_profile_is_in_the_table() -> None:
    """No rule without an example of its signal; names are not used twice."""
    names = [rule.name for rule in EVERY_RULE]
    assert sorted(names) == sorted(set(names)) == sorted({row[2] for row in FINDINGS})
    assert all(rule.meaning and rule.source for rule in EVERY_RULE)


@pytest.mark.parametrize("body", [row[1] for row in HEALTHY], ids=[row[0] for row in HEALTHY])
def test_a_healthy_node_shows_nothing(body: Body) -> None:
    """What is absent, unknown or good counts against nobody, whichever profiles are on."""
    assert node_rules.signals(body, EVERY_RULE, now=NOW) == ()


FLAPPING = NodeRule(
    name="flapping",
    kind="Condition",
    key="Bad",
    values=("True",),
    severity=Severity.MOVE_NOW,
    debounce_seconds=10,
    recovery_seconds=60,
)


def seen(at: float, bad: bool, previous: Any = ()) -> Any:
    body = raw(conditions=[condition("Bad", "True" if bad else "False")])
    return node_rules.signals(body, [FLAPPING], now=NOW + timedelta(seconds=at), previous=previous)


def counts(present: Any, at: float) -> bool:
    return node_rules.active(present, NOW + timedelta(seconds=at)) is not None


def test_a_signal_counts_when_it_has_lasted() -> None:
    """Not before its debounce time; an unchanged sighting changes nothing."""
    first = seen(0, bad=True)
    assert not counts(first, 9.9)
    assert node_rules.due_at(first, NOW) == NOW + timedelta(seconds=10)
    assert counts(first, 10)
    assert seen(5, bad=True, previous=first) == first
    assert node_rules.due_at(first, NOW + timedelta(seconds=10)) is None


def test_a_flapping_signal_is_one_signal() -> None:
    """Its clock goes on through short absences, in which it does not count, and starts anew after a long one."""
    absent = seen(5, bad=False, previous=seen(0, bad=True))
    assert not counts(absent, 20)
    assert counts(seen(20, bad=True, previous=absent), 20)
    assert seen(65, bad=False, previous=absent) == ()
    assert not counts(seen(66, bad=True, previous=seen(65, bad=False, previous=absent)), 66)


@pytest.mark.parametrize("rule", [rule for rule in EVERY_RULE if rule.kind == "Condition"], ids=lambda rule: rule.name)
def test_a_monitor_that_starts_anew_says_nothing_new(rule: NodeRule) -> None:
    """It sets its conditions to their initial value, and to the bad one again: the signal of before goes on."""
    [status] = rule.values
    key = rule.key.replace("*", "Some")

    def at(seconds: float, status: str, previous: Any = ()) -> Any:
        body = raw(conditions=[condition(key, status)])
        return node_rules.signals(body, [rule], now=NOW + timedelta(seconds=seconds), previous=previous)

    first = at(0, status)
    cleared = at(4, "False" if status == "True" else "True", first)
    assert node_rules.active(cleared, NOW + timedelta(seconds=4)) is None
    assert at(9, status, cleared) == first


def test_a_clock_that_was_set_back_delays_by_the_debounce_time_only() -> None:
    """A first sighting in the future is a sighting now."""
    assert counts(seen(0, bad=True, previous=seen(86_400, bad=True)), 10)


def test_a_node_replaced_under_its_name_starts_anew() -> None:
    """The signal of the machine before says nothing about this one."""
    body = raw(conditions=[condition("Bad", "True")])
    before = node_of(body, now=NOW, rules=[FLAPPING])
    other = {**body, "metadata": {**body["metadata"], "uid": "another"}}
    later = NOW + timedelta(seconds=30)
    assert node_of(body, now=later, rules=[FLAPPING], previous=before).signals[0].since == NOW
    assert node_of(other, now=later, rules=[FLAPPING], previous=before).signals[0].since == later


def test_the_worst_signal_decides() -> None:
    """MoveNow before CheckpointThenMove before Avoid."""
    body = raw(
        unschedulable=True,
        taints=[taint("node.cloudprovider.kubernetes.io/shutdown")],
        conditions=[condition("MaintenancePlanned", "True")],
    )
    worst = node_rules.active(node_rules.signals(body, profile("kubernetes"), now=NOW), NOW)
    assert worst is not None
    assert worst.rule == "node-shutdown"


def test_a_later_rule_of_the_same_name_replaces_an_earlier_one() -> None:
    """An installation can change a rule of a profile."""
    [rule] = node_rules.parse(
        b'[{"name": "r", "kind": "Label", "key": "a", "severity": "Avoid"},'
        b' {"name": "r", "kind": "Label", "key": "a", "severity": "MoveNow", "debounceSeconds": 3}]'
    )
    assert (rule.severity, rule.debounce_seconds) == (Severity.MOVE_NOW, 3)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "Lable"}, "kind"),
        ({"severity": "Move"}, "severity"),
        ({"key": ""}, "needs a key"),
        ({"kind": "Condition"}, "needs values"),
        ({"kind": "Unschedulable"}, "neither key nor values"),
        ({"kind": "Missing", "values": ["x"]}, "has no values"),
        ({"reasons": ["x"]}, "only conditions have reasons"),
        ({"debounceSeconds": -1}, "debounceSeconds"),
        ({"debounce": 1}, "debounce"),
        ({"name": "Not_A_Name"}, "name"),
    ],
)
def test_a_wrong_rule_is_refused_by_its_field(changes: Body, told: str) -> None:
    """Nothing is guessed: an unknown word or a missing one is an error that names it."""
    with pytest.raises(ValidationError, match=told):
        NodeRule.model_validate({"name": "r", "kind": "Label", "key": "a", "severity": "Avoid", **changes})


def test_a_missing_label_is_found() -> None:
    """The kind Missing asks for a presence."""
    rule = NodeRule(name="r", kind="Missing", key="nvidia.com/gpu.present", severity=Severity.AVOID)
    assert node_rules.signals(raw(), [rule], now=NOW)[0].detail == "label nvidia.com/gpu.present is missing"
    assert node_rules.signals(raw({"nvidia.com/gpu.present": "true"}), [rule], now=NOW) == ()
