"""The story of a session, as `kubectl describe` tells it: which Kubernetes events a change of status is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from everloop_operator.api import names
from everloop_operator.api.training_session_status import FailureStatus, Recovery, TrainingSessionStatus

from . import failure_classes, lifecycle, recoveries
from .losses import Loss
from .observed import Observed


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `key` is the same whenever the same occurrence is told again, which is then not posted twice."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    key: str
    order: tuple[int, int] = (0, 0)
    """Attempt and place within the pass: events of one second are sorted by their names, which begin with this."""


def tell(
    observed: Observed,
    desired: TrainingSessionStatus,
    loss: Loss | None,
    merged: recoveries.Merged,
    *,
    avoid: Sequence[str],
    created: Mapping[str, Any] | None,
    forced: Mapping[str, str],
) -> tuple[Event, ...]:
    """Events of the step from the recorded status to the desired one."""
    before = observed.session.status
    events: list[Event] = []
    attempt = desired.attempt
    if attempt > before.attempt > 0 and loss:
        reason = names.EVENT_NODE_UNHEALTHY if loss.reason == names.RECOVERY_NODE_HEALTH else loss.reason
        if loss.reason in failure_classes.CLASSES:
            kind: Literal["Normal", "Warning"] = "Normal" if loss.budget == "none" else "Warning"
            events.append(Event(kind, reason, loss.message, f"{attempt}"))
        message = f"attempt {attempt} replaces attempt {before.attempt} ({loss.reason})"
        if loss.reason in (names.RECOVERY_SPEC_CHANGED, names.RECOVERY_AVOIDANCE_LIFTED):
            message += f": {loss.message}"
        events.append(Event("Normal", names.EVENT_NEW_ATTEMPT, message, f"{attempt}"))
    events += _container_failure(before.failure, desired.failure)
    if before.rest and desired.rest is None:
        message = f"attempt {attempt} goes on after {before.rest.state}"
        events.append(Event("Normal", names.EVENT_RESUMED, message, f"{attempt}"))
    if desired.rest and desired.rest.state == "Failed" and before.rest is None:
        message = "Failed for as long as spec.ttlSecondsAfterFinished allows: no pod until the spec is changed"
        events.append(Event("Normal", names.EVENT_STOPPING, message, desired.rest.since))
    if desired.rest and desired.phase in lifecycle.EVENTS and desired.phase != before.phase:
        ready = _condition(desired, names.CONDITION_READY)
        key = f"{attempt}-{desired.rest.since}"
        events.append(Event("Normal", lifecycle.EVENTS[desired.phase], ready.message, key))
    if created:
        message = f"created pod {created['metadata']['name']}"
        if avoid:
            message += f", not on {', '.join(avoid)}"
        events.append(Event("Normal", names.EVENT_POD_CREATED, message, f"{attempt}"))
    for name, why in forced.items():
        events.append(Event("Normal", names.EVENT_POD_FORCE_DELETED, f"removed pod {name}: {why}", name))
    if desired.phase == names.PHASE_RUNNING and not merged.completed and before.phase in _BEFORE_SERVING:
        message = f"attempt {attempt} serves on {desired.pod.node if desired.pod else '?'}"
        serving = _condition(desired, names.CONDITION_SERVING)
        events.append(Event("Normal", names.EVENT_SERVING, message, f"{attempt}-{serving.last_transition_time}"))
    for entry in merged.completed:
        node = desired.pod.node if desired.pod else "?"
        message = f"attempt {attempt} serves on {node} {entry.seconds} s after the loss was detected{_figures(entry)}"
        events.append(Event("Normal", names.EVENT_RECOVERED, message, entry.id))
    for entry in merged.added:
        in_server = entry.reason == names.RECOVERY_SERVER_RESTARTED
        reason = names.EVENT_SERVER_RECOVERED if in_server else names.EVENT_ENGINE_RECOVERED
        what = "the server" if in_server else "the engine"
        message = f"{what} on {entry.node} was lost and is back after {entry.seconds} s{_figures(entry)}"
        events.append(Event("Normal", reason, message, entry.id))
    mismatches = desired.storage.replay_mismatches if desired.storage else 0
    if mismatches > (before.storage.replay_mismatches if before.storage else 0):
        message = f"{mismatches} replayed operations gave another result than before; see the trainer's log"
        events.append(Event("Warning", names.EVENT_REPLAY_MISMATCH, message, f"{attempt}-{mismatches}"))
    stalled = _condition(desired, names.CONDITION_STALLED)
    was = _condition(before, names.CONDITION_STALLED)
    if stalled and stalled.status == "True" and (was is None or (was.status, was.reason) != ("True", stalled.reason)):
        key = f"{stalled.reason}-{stalled.last_transition_time}"
        events.append(Event("Warning", names.EVENT_STALLED, f"{stalled.reason}: {stalled.message}", key))
    return tuple(replace(event, order=(attempt, place)) for place, event in enumerate(events))


def _container_failure(before: FailureStatus | None, after: FailureStatus | None) -> list[Event]:
    """A container that has ended, if it is another one than before."""
    if after is None or (before and (before.pod_uid, before.time) == (after.pod_uid, after.time)):
        return []
    kind: Literal["Normal", "Warning"] = "Normal" if failure_classes.budget_of(after.reason) == "none" else "Warning"
    message = f"{after.reason}: {after.message}{failure_classes.remedy(after.reason)}"
    return [Event(kind, names.EVENT_CONTAINER_FAILED, message, f"{after.pod_uid}-{after.time}")]


_BEFORE_SERVING = ("", names.PHASE_PENDING, names.PHASE_QUEUED, names.PHASE_STARTING, names.PHASE_FAILED)
"""Phases that no other event ends."""


def _figures(entry: Recovery) -> str:
    if entry.replayed_operations is None:
        return ""
    resumed = f"resumed from {entry.resumed_from}, " if entry.resumed_from else ""
    return f": {resumed}replayed {entry.replayed_operations} operations, lost {entry.lost_operations}"


def _condition(status: TrainingSessionStatus, kind: str) -> Any:
    return next((condition for condition in status.conditions if condition.type == kind), None)
