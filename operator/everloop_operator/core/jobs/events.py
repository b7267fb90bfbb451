"""The story of a job: which Kubernetes events a change of status is worth."""

from __future__ import annotations

from dataclasses import replace

from everloop_operator.api import names
from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core.events import Event

from .decision import Decision
from .observed import ObservedJob


def tell(
    observed: ObservedJob, desired: RLJobStatus, decision: Decision | None, *, session_created: bool
) -> tuple[Event, ...]:
    """Events of the step from the recorded status to the desired one."""
    before, events = observed.job.status, list[Event]()
    attempt = desired.attempt
    if session_created:
        name = observed.job.session_name
        events.append(Event("Normal", names.EVENT_SESSION_CREATED, f"created TrainingSession {name}", name))
    if decision and decision.loss and attempt > before.attempt > 0:
        loss = decision.loss
        if loss.budget != "none":
            reason = names.EVENT_DRIVER_FAILED if loss.budget == "application" else loss.reason
            events.append(Event("Warning", reason, loss.message, f"{attempt}"))
        message = f"driver {attempt} takes over from driver {before.attempt} ({loss.reason})"
        events.append(Event("Normal", names.EVENT_NEW_ATTEMPT, message, f"{attempt}"))
    if decision and decision.create:
        events.append(Event("Normal", names.EVENT_POD_CREATED, f"created the pod of driver {attempt}", f"{attempt}"))
    if desired.phase != before.phase:
        ready = next(c for c in desired.conditions if c.type == names.CONDITION_READY)
        key = f"{attempt}-{ready.reason}-{ready.last_transition_time}"
        message = f"{ready.reason}: {ready.message}"
        if desired.phase == names.PHASE_SUSPENDED:
            events.append(Event("Normal", names.EVENT_SUSPENDED, ready.message, key))
        elif desired.phase == names.PHASE_COMPLETED:
            events.append(Event("Normal", names.EVENT_COMPLETED, message, key))
        elif desired.phase == names.PHASE_FAILED:
            reason = names.EVENT_FAILED if desired.finish_time else names.EVENT_STALLED
            events.append(Event("Warning", reason, message, key))
    return tuple(replace(event, order=(attempt, place)) for place, event in enumerate(events))
