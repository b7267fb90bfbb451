"""When a job is finished, and with what result."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from everloop_operator.api import names
from everloop_operator.api.rl_job import RLJobSpec
from everloop_operator.api.rl_job_status import RLJobStatus

from .observed import ObservedJob


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job has ended."""

    phase: str
    reason: str
    message: str


def completed(observed: ObservedJob, spec: RLJobSpec) -> Outcome | None:
    """Why the job is Completed, or None while it is not. The goal comes before the end, and that before a limit.

    A driver that has reported that it is done may end as it likes: what its interpreter does after that is no failure.
    """
    report, goal = observed.report, spec.goal
    if goal and report and report.goal_reached is not None:
        sign = "at least" if goal.direction == "AtLeast" else "at most"
        times = f" {goal.consecutive} times in a row" if goal.consecutive > 1 else ""
        message = f"{goal.metric} was {sign} {goal.value}{times}, at last in iteration {report.goal_reached}"
        return Outcome(names.PHASE_COMPLETED, names.REASON_GOAL_REACHED, message)
    current = observed.current
    if current and current.pod.phase == "Succeeded":
        return Outcome(names.PHASE_COMPLETED, names.REASON_SUCCEEDED, "the driver has done its work")
    if report and report.done:
        message = f"the driver has reported that its work is done, with iteration {report.iteration}"
        return Outcome(names.PHASE_COMPLETED, names.REASON_SUCCEEDED, message)
    limits = spec.limits
    if limits.max_iterations is not None and report and report.iteration >= limits.max_iterations:
        message = f"iteration {report.iteration} is done (spec.limits.maxIterations)"
        return Outcome(names.PHASE_COMPLETED, names.REASON_LIMIT_REACHED, message)
    due = active_until(observed.job.status, spec)
    if due and observed.now >= due:
        message = f"the job was active for {limits.active_seconds} s (spec.limits.activeSeconds)"
        return Outcome(names.PHASE_COMPLETED, names.REASON_LIMIT_REACHED, message)
    return None


def active_until(status: RLJobStatus, spec: RLJobSpec) -> datetime | None:
    """When the limit of active time is reached if nothing happens; None if never."""
    if spec.limits.active_seconds is None or status.active_since is None:
        return None
    left = spec.limits.active_seconds - status.active_seconds
    return datetime.fromisoformat(status.active_since) + timedelta(seconds=left)


def removal_due(status: RLJobStatus, spec: RLJobSpec) -> datetime | None:
    """When the children of a finished job are to be removed; None while it is not finished."""
    if status.finish_time is None:
        return None
    return datetime.fromisoformat(status.finish_time) + timedelta(seconds=spec.ttl_seconds_after_finished)
