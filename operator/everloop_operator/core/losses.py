"""When an attempt is over, and why: the one place that decides that a pod must be replaced."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from everloop_operator.api import names

from . import failure_classes, failures, node_health
from .failure_classes import Budgeted
from .observed import Observed, Pod, within

AVOIDANCE_PATIENCE_SECONDS = 5.0
"""How long the scheduler may look for another node before one that failed, but is Ready again, is good enough."""

FAILED_NODE = frozenset(row.reason for row in failure_classes.CLASSES.values() if row.shuns_node)
"""Reasons for which the next pods must not run on the same node."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an attempt is over."""

    reason: str
    message: str
    node: str = ""
    rule: str = ""
    """Name of the rule on node health that asked for it."""

    @property
    def budget(self) -> Budgeted:
        """Which budget it uses."""
        return failure_classes.budget_of(self.reason)

    @property
    def backs_off(self) -> bool:
        """Whether the next attempt waits when there were failures lately."""
        return self.reason in failure_classes.CLASSES and failure_classes.CLASSES[self.reason].backs_off


@dataclass(frozen=True, slots=True)
class Limits:
    """What the decision that an attempt is over depends on, beside what is observed."""

    template_hashes: tuple[str, ...]
    """Of pods that are as the spec asks for."""
    node_lost_seconds: float
    checkpoint_seconds: float
    """For how long a pod that has to leave its node may write snapshots before it does."""
    fleet_cap: float
    """Share of the nodes with session pods that may be left at a time for their health, 0 to 1."""
    progress_seconds: float
    """How long one operation may run."""


def find(observed: Observed, attempt: int, pod: Pod | None, limits: Limits) -> Loss | None:
    """Why `attempt` is over, or None while it may go on. `pod` is its pod, None if there is none.

    Nodes come first: a pod on a lost node may still answer, and still must be replaced.
    """
    recorded = observed.session.status.pod if observed.session.status.attempt == attempt else None
    name = pod.name if pod else (recorded.name if recorded else f"of attempt {attempt}")
    node_name = pod.node if pod else (recorded.node if recorded else "")
    recorded_uid = recorded.node_uid if recorded and recorded.node == node_name else ""
    if node_name and observed.nodes_watched:
        # A pod that is gone is lost anyway: a node that is not Ready is then the cause, however short.
        gone = pod is None or pod.deletion_requested is not None
        loss = _node_loss(observed, node_name, recorded_uid, 0.0 if gone else limits.node_lost_seconds)
        if loss:
            return loss
    if pod is None:
        return Loss(names.RECOVERY_POD_LOST, f"pod {name} no longer exists", node_name)
    if pod.terminal:
        reason = pod.failure or pod.disruption or "no reason given"
        return Loss(failures.of_pod(pod), f"pod {name} is {pod.phase}: {reason}", node_name)
    if pod.disruption:
        what = "is being deleted" if pod.deletion_requested else "is about to be disrupted"
        return Loss(failures.of_disruption(pod), f"pod {name} {what} ({pod.disruption})", node_name)
    if pod.deletion_requested:
        return Loss(names.RECOVERY_POD_DELETED, f"pod {name} is being deleted", node_name)
    if pod.container.exit_code == names.EXIT_FENCED:
        detail = pod.container.exit_message or "another incarnation owns the storage"
        return Loss(names.RECOVERY_FENCED, f"pod {name} was fenced off: {detail}", node_name)
    if pod.container.exit_code == names.EXIT_ACCELERATOR_FAILED:
        detail = pod.container.exit_message or "no message"
        return Loss(
            names.RECOVERY_ACCELERATOR_FAILED, f"an accelerator of node {node_name} failed: {detail}", node_name
        )
    stuck = observed.trainer.running_since
    if stuck and observed.trainer.unreachable_since is None and observed.now >= due(stuck, limits.progress_seconds):
        underway = observed.trainer.report.underway if observed.trainer.report else None
        what = underway.operation if underway else "an operation"
        message = f"{what} has run for more than {limits.progress_seconds:.0f} s (spec.deadlines.progressSeconds)"
        return Loss(names.RECOVERY_NO_PROGRESS, message, node_name)
    if pod.template_hash not in limits.template_hashes:
        return Loss(names.RECOVERY_SPEC_CHANGED, "the spec asks for another pod", node_name)
    verdict = node_health.judge(observed, pod, limits.fleet_cap)
    if verdict and node_health.may_leave(observed, verdict, limits.checkpoint_seconds):
        return Loss(names.RECOVERY_NODE_HEALTH, verdict.message, verdict.node, verdict.signal.rule)
    if _avoids_in_vain(observed, pod):
        nodes = ", ".join(sorted(pod.avoided_nodes))
        return Loss(names.RECOVERY_AVOIDANCE_LIFTED, f"no node but those that failed before ({nodes}) has room")
    return None


def due(since: datetime, seconds: float) -> datetime:
    """When so much time has passed."""
    return since + timedelta(seconds=seconds)


def replaced(attempt: int, pod: Pod | None) -> Loss:
    """The loss of an attempt that has a successor already, where its cause can't be seen any more."""
    return Loss(names.RECOVERY_POD_DELETED, f"attempt {attempt} has been replaced", pod.node if pod else "")


def _node_loss(observed: Observed, name: str, recorded_uid: str, node_lost_seconds: float) -> Loss | None:
    node = observed.nodes.get(name)
    if node is None:
        return Loss(names.RECOVERY_NODE_GONE, f"node {name} no longer exists", name)
    if recorded_uid and recorded_uid != node.uid:
        return Loss(names.RECOVERY_NODE_GONE, f"node {name} was replaced by another of the same name", name)
    if node.out_of_service:
        return Loss(names.RECOVERY_NODE_LOST, f"node {name} is out of service", name)
    if node.not_ready_since and not within(observed.now - node.not_ready_since, node_lost_seconds):
        why = f" ({node.reason})" if node.reason else ""
        return Loss(names.RECOVERY_NODE_LOST, f"node {name} is not Ready{why}", name)
    return None


def _avoids_in_vain(observed: Observed, pod: Pod) -> bool:
    if pod.unschedulable_since is None or not pod.avoided_nodes:
        return False
    patient_until = pod.unschedulable_since + timedelta(seconds=AVOIDANCE_PATIENCE_SECONDS)
    back = any(node.ready and node.hostname in pod.avoided_nodes for node in observed.nodes.values())
    return back and observed.now >= patient_until


def proof_of_death(observed: Observed, pod: Pod) -> str:
    """Why the pod certainly runs no more, or ''."""
    if not pod.node or not observed.nodes_watched:
        return ""
    node = observed.nodes.get(pod.node)
    if node is None:
        return f"node {pod.node} no longer exists"
    if node.out_of_service:
        return f"node {pod.node} is out of service"
    if pod.terminal and not node.ready:
        return f"it is {pod.phase}"  # on a Ready node its kubelet removes it in a moment
    return ""


def reported_epoch(observed: Observed, pod: Pod | None) -> int:
    """Highest attempt that the session's storage is known to have seen; 0 if nothing is known.

    A re-created TrainingSession starts counting anew, and finds the storage of its predecessor.
    """
    report = observed.trainer.report
    known = [report.incarnation.attempt] if report and report.incarnation else []
    if pod and pod.container.exit_code == names.EXIT_FENCED:
        known += [int(number) for number in re.findall(r"attempt\D{0,3}(\d{1,9})", pod.container.exit_message)]
    return max(known, default=0)


def avoided_nodes(observed: Observed, loss: Loss | None, avoid_seconds: int) -> list[str]:
    """Hostnames that the next pod must not run on: of nodes that were lost under this session lately."""
    if loss and loss.reason == names.RECOVERY_AVOIDANCE_LIFTED:
        return sorted(
            _hostname(observed, name) for name in _failed(observed, avoid_seconds) if not _ready(observed, name)
        )
    failed = _failed(observed, avoid_seconds)
    if loss and loss.reason in FAILED_NODE:
        failed.add(loss.node)
    return sorted(_hostname(observed, name) for name in failed)


def _failed(observed: Observed, avoid_seconds: int) -> set[str]:
    oldest = observed.now - timedelta(seconds=avoid_seconds)
    return {
        entry.node
        for entry in observed.session.status.recoveries
        if entry.reason in FAILED_NODE and datetime.fromisoformat(entry.time) > oldest
    }


def _hostname(observed: Observed, name: str) -> str:
    node = observed.nodes.get(name)
    return node.hostname if node else name


def _ready(observed: Observed, name: str) -> bool:
    node = observed.nodes.get(name)
    return node is not None and node.ready
