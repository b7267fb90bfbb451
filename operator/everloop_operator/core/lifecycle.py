"""Whether a session is to have a pod at all, and how a pod is removed in good order: snapshots first, then deletion."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import (
    Condition,
    LeavingStatus,
    RestStatus,
    TrainingSessionStatus,
)

from .health import serves
from .observed import Observed, Pod
from .projections import format_time

RestState = Literal["Suspended", "Idle", "Stopped", "Failed"]


FINAL = frozenset(
    {
        names.REASON_BUDGET_EXHAUSTED,
        names.REASON_CRASH_LOOP,
        names.REASON_POD_INVALID,
        names.REASON_STORAGE_MISMATCH,
        names.REASON_VOLUME_UNFIT,
    }
)
"""Reasons of the condition Stalled after which somebody has to do something; deadlines may be kept after all."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Why a session is to have no pod."""

    state: RestState
    """The phase to come to."""
    why: str
    """For people."""
    request: str
    """Name of the request for snapshots that comes first."""


def rest(observed: Observed, spec: TrainingSessionSpec) -> Rest | None:
    """Why the session is to have no pod; None where it is to have one."""
    generation = observed.session.generation
    if spec.stop:
        return Rest("Stopped", "spec.stop is true: it is stopped for ever, and what is in storage stays", "stop")
    if spec.suspend:
        why = "spec.suspend is true: calls wait until it is false again"
        return Rest("Suspended", why, f"suspend-{generation}")
    return _given_up(observed, spec) or _idle(observed, spec)


def _given_up(observed: Observed, spec: TrainingSessionSpec) -> Rest | None:
    before, stalled = observed.session.status.rest, _stalled(observed.session.status)
    if before and before.state == "Failed":
        return Rest("Failed", stalled.message if stalled else "", "") if _same_spec(observed, before) else None
    due = expiry(observed, spec, observed.session.status)
    if stalled is None or due is None or observed.now < due:
        return None
    return Rest("Failed", stalled.message, "")


def _same_spec(observed: Observed, record: RestStatus) -> bool:
    return record.generation == observed.session.generation


def _stalled(status: TrainingSessionStatus) -> Condition | None:
    """The condition Stalled, where nothing will change by itself."""
    found = next((c for c in status.conditions if c.type == names.CONDITION_STALLED), None)
    return found if found and found.status == "True" and found.reason in FINAL else None


def expiry(observed: Observed, spec: TrainingSessionSpec, status: TrainingSessionStatus) -> datetime | None:
    """When what is left of a session that is Stopped, or Failed for good, is removed; None if nothing is."""
    stalled, since = _stalled(status), None
    if stalled:
        since = stalled.last_transition_time
    elif status.rest and status.rest.state == "Stopped" and observed.session.made_by_gateway:
        since = status.rest.since
    if since is None:
        return None
    return datetime.fromisoformat(since) + timedelta(seconds=spec.ttl_seconds_after_finished)


def expired(observed: Observed, spec: TrainingSessionSpec) -> bool:
    """Whether the object itself is to go: only the gateway's, which come back when somebody asks for them."""
    session, phase = observed.session, observed.session.status.phase
    if not session.made_by_gateway or phase not in (names.PHASE_STOPPED, names.PHASE_FAILED) or session.deleting:
        return False
    due = expiry(observed, spec, observed.session.status)
    return due is not None and observed.now >= due


def _idle(observed: Observed, spec: TrainingSessionSpec) -> Rest | None:
    before, after = observed.session.status.rest, spec.idle.after_seconds
    if after == 0:
        return None
    how = "the next call brings it back"
    if spec.idle.on_call == "Refuse":
        how = f"calls do not bring it back (spec.idle.onCall), a change of the annotation {names.ANNOTATION_WAKE} does"
    why = f"nobody has used it for {after} s (spec.idle.afterSeconds): {how}"
    if before and before.state == "Idle":
        return Rest("Idle", why, "idle") if before.wake == observed.session.wake else None
    due = idle_due(observed, spec)
    if due is None or observed.now < due:
        return None
    return Rest("Idle", why, f"idle-{due.timestamp():.0f}")


def idle_due(observed: Observed, spec: TrainingSessionSpec) -> datetime | None:
    """When the session becomes idle if nobody calls until then; None while it is used, or if it never does."""
    trainer = observed.trainer
    if spec.idle.after_seconds == 0 or trainer.idle_since is None or trainer.unreachable_since is not None:
        return None
    return trainer.idle_since + timedelta(seconds=spec.idle.after_seconds)


def leaving(observed: Observed, request: str) -> LeavingStatus:
    """The record of a request for snapshots; it keeps the time of its first pass."""
    before = observed.session.status.leaving
    if before and before.request == request:
        return before
    return LeavingStatus(request=request, since=format_time(observed.now))


def deadline(record: LeavingStatus, seconds: float) -> datetime:
    """Until when the pod may go on writing snapshots."""
    return datetime.fromisoformat(record.since) + timedelta(seconds=seconds)


def may_leave(observed: Observed, pod: Pod, record: LeavingStatus, seconds: float) -> bool:
    """Whether the pod may be removed: its snapshots are written, would take too long, or it has none to write."""
    if pod.deletion_requested or pod.terminal or not serves(observed, pod.attempt, pod):
        return True
    asked = observed.trainer.report.snapshot_request if observed.trainer.report else None
    written = asked is not None and asked.id == record.request and asked.pending == 0
    return written or observed.now >= deadline(record, seconds)


def record(observed: Observed, wanted: Rest | None, *, resumed: bool) -> RestStatus | None:
    """The record of a rest: it keeps the time of its first pass, and stays until there is another attempt."""
    before = observed.session.status.rest
    if wanted is None:
        return None if resumed else before
    if before and before.state == wanted.state and (wanted.state != "Failed" or _same_spec(observed, before)):
        return before
    wake = observed.session.wake if wanted.state == "Idle" else ""
    generation = observed.session.generation if wanted.state == "Failed" else None
    return RestStatus(state=wanted.state, since=format_time(observed.now), wake=wake, generation=generation)


def resumes(status: TrainingSessionStatus) -> bool:
    """Whether a session that is to have a pod has none on purpose: the next attempt follows no loss."""
    return status.rest is not None


EVENTS = {
    names.PHASE_STOPPING: names.EVENT_STOPPING,
    names.PHASE_SUSPENDED: names.EVENT_SUSPENDED,
    names.PHASE_IDLE: names.EVENT_IDLE,
    names.PHASE_STOPPED: names.EVENT_STOPPED,
}
"""Phase -> reason of the event that tells of coming to it."""
