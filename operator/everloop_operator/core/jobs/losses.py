"""When a driver is over, and why."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from everloop_operator.api import names
from everloop_operator.api.rl_job import RLJobSpec
from everloop_operator.api.rl_job_status import LossStatus
from everloop_operator.core.observed import Pod, within

from .observed import Driver, ObservedJob

Budgeted = Literal["infrastructure", "application", "none"]

OUT_OF_MEMORY = "OOMKilled"


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a driver is over."""

    reason: str
    message: str
    budget: Budgeted
    """Which budget it uses; `none` for what somebody asked for."""
    node: str = ""
    exit_code: int | None = None
    out_of_memory: bool = False

    @property
    def by_itself(self) -> bool:
        """Whether the pod ended by itself: then the next one waits longer each time."""
        return self.reason in (names.RECOVERY_DRIVER_FAILED, names.RECOVERY_POD_FAILED)


RESUMED = Loss(names.RECOVERY_RESUMED, "the job is no longer suspended", "none")
"""What ends a driver that was ended because its job was to rest."""


def progress_due(observed: ObservedJob, spec: RLJobSpec) -> datetime | None:
    """When a driver that reports nothing new is lost, if it and its session go on like this; None if never.

    What counts is the time in which the driver ran, its session served, and its progress reader answered.
    """
    limit, progress, current = spec.deadlines.progress_seconds, observed.progress, observed.current
    if limit is None or current is None or observed.session is None or progress.unreachable_since:
        return None
    # A call would wake an idle session: it has none, so the driver is silent in every way.
    serving = progress.idle_since if observed.session.wakes else observed.session.serving_since
    times = (progress.idle_since, current.pod.container.started, serving)
    known = [time for time in times if time is not None]
    return max(known) + timedelta(seconds=limit) if len(known) == len(times) else None


def silent(observed: ObservedJob, spec: RLJobSpec) -> Loss | None:
    """The loss of a driver that has reported nothing new for longer than `spec.deadlines.progressSeconds`."""
    status = observed.job.status
    if status.loss and status.loss.reason == names.RECOVERY_NO_PROGRESS and status.attempt == observed.attempt:
        return recorded(status.loss)  # it is asked no more while it waits for its successor
    due, current = progress_due(observed, spec), observed.current
    if due is None or current is None or observed.now < due:
        return None
    message = (
        f"the driver in pod {current.pod.name} has reported nothing new for {spec.deadlines.progress_seconds} s "
        "(spec.deadlines.progressSeconds)"
    )
    return Loss(names.RECOVERY_NO_PROGRESS, message, "application", current.pod.node)


def recorded(loss: LossStatus) -> Loss:
    """A loss as an earlier pass has found it."""
    return Loss(loss.reason, loss.message, loss.budget, loss.node)


def find(
    observed: ObservedJob, attempt: int, driver: Driver | None, template_hash: str, lost_after: float
) -> Loss | None:
    """Why `attempt` is over, or None while it may go on. A driver that ended well is none: see `outcome`.

    Args:
        observed: the observation.
        attempt: the attempt in question.
        driver: its pod, None if there is none.
        template_hash: of the pod that the spec asks for.
        lost_after: seconds for which a node may be not Ready.
    """
    recorded = observed.job.status.pod if observed.job.status.attempt == attempt else None
    pod = driver.pod if driver else None
    name = pod.name if pod else (recorded.name if recorded else f"of attempt {attempt}")
    node = pod.node if pod else (recorded.node if recorded else "")
    ended = _ended(pod, name) if pod else None
    if ended:
        return ended
    if node:
        recorded_uid = recorded.node_uid if recorded and recorded.node == node else ""
        gone = pod is None or pod.deletion_requested is not None
        lost = _node_loss(observed, node, recorded_uid, 0.0 if gone else lost_after)
        if lost:
            return lost
    if pod is None or driver is None:
        return Loss(names.RECOVERY_POD_LOST, f"pod {name} no longer exists", "infrastructure", node)
    if pod.deletion_requested or pod.disruption:
        why = f" ({pod.disruption})" if pod.disruption else ""
        return Loss(names.RECOVERY_POD_DELETED, f"pod {name} is being deleted{why}", "none", node)
    if pod.phase == "Succeeded":
        return None
    if pod.template_hash != template_hash:
        return Loss(names.RECOVERY_SPEC_CHANGED, "the spec asks for another driver", "none", node)
    report = observed.report
    if report and report.state == "Stale" and driver is observed.current:
        message = f"the storage holds iteration {report.resume.iteration}, and pod {name} was to start from another"
        return Loss(names.RECOVERY_NEWER_CHECKPOINT, message, "none", node)
    return None


def _ended(pod: Pod, name: str) -> Loss | None:
    """The loss of a pod that failed. What its kubelet or its node did to it is no fault of the program."""
    if pod.phase != "Failed":
        return None
    container = pod.container
    if pod.disruption:
        return Loss(names.RECOVERY_POD_DELETED, f"pod {name} was disrupted ({pod.disruption})", "none", pod.node)
    if pod.failure or pod.deletion_requested or container.exit_code is None:
        why = pod.failure or ("it was deleted" if pod.deletion_requested else "no reason given")
        budget: Budgeted = "none" if pod.deletion_requested else "infrastructure"
        reason = names.RECOVERY_POD_DELETED if pod.deletion_requested else names.RECOVERY_POD_FAILED
        return Loss(reason, f"pod {name} failed: {why}", budget, pod.node)
    out_of_memory = container.exit_reason == OUT_OF_MEMORY
    how = "ran out of memory" if out_of_memory else f"ended with exit code {container.exit_code}"
    return Loss(
        names.RECOVERY_DRIVER_FAILED, f"the driver in pod {name} {how}", "application", pod.node,
        exit_code=container.exit_code, out_of_memory=out_of_memory,
    )  # fmt: skip


def _node_loss(observed: ObservedJob, name: str, recorded_uid: str, lost_after: float) -> Loss | None:
    if not observed.nodes_watched:
        return None
    node = observed.nodes.get(name)
    if node is None or (recorded_uid and recorded_uid != node.uid):
        return Loss(names.RECOVERY_NODE_GONE, f"node {name} no longer exists", "infrastructure", name)
    if node.out_of_service:
        return Loss(names.RECOVERY_NODE_LOST, f"node {name} is out of service", "infrastructure", name)
    if node.not_ready_since and not within(observed.now - node.not_ready_since, lost_after):
        why = f" ({node.reason})" if node.reason else ""
        return Loss(names.RECOVERY_NODE_LOST, f"node {name} is not Ready{why}", "infrastructure", name)
    return None


def proof_of_death(observed: ObservedJob, pod: Pod) -> str:
    """Why the pod certainly runs no more, or ''."""
    if not pod.node or not observed.nodes_watched:
        return ""
    node = observed.nodes.get(pod.node)
    if node is None:
        return f"node {pod.node} no longer exists"
    if node.out_of_service:
        return f"node {pod.node} is out of service"
    return ""


def shunned(observed: ObservedJob) -> list[str]:
    """Hostnames that the next driver had better not run on."""
    return sorted(node.hostname for node in observed.nodes.values() if not node.ready or node.out_of_service)
