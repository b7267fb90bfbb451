"""Deletion and pause of a TrainingSession: when its finalizer goes, and what is said while nothing is done."""

from __future__ import annotations

from datetime import datetime, timedelta

from everloop_operator.api import names
from everloop_operator.api.training_session_status import TrainingSessionStatus

from . import conditions
from .aspect import Aspect
from .events import Event
from .observed import Observed
from .projections import format_time


def deadline(observed: Observed) -> datetime | None:
    """Until when the deletion may wait for copies; None where it waits for none."""
    session = observed.session
    if session.spec is None or session.deletion_time is None or not session.spec.deletion.wait_for_copies:
        return None
    return session.deletion_time + timedelta(seconds=session.spec.deletion.deadline_seconds)


def waits(observed: Observed) -> bool:
    """Whether the session is kept for its copies although its deletion was asked for."""
    until = deadline(observed)
    return until is not None and observed.now < until and _copies_missing(observed)


def given_up(observed: Observed) -> tuple[Event, ...]:
    """What is told of a deletion that waits no longer: whether it has waited for its copies in vain."""
    until = deadline(observed)
    if until is None or not _copies_missing(observed):
        return ()
    seconds = observed.session.spec.deletion.deadline_seconds if observed.session.spec else 0
    message = f"deleted without {_missing_copies(observed)}: spec.deletion.deadlineSeconds ({seconds}) are over"
    return (Event("Warning", names.EVENT_COPIES_MISSING, message, format_time(until)),)


def _copies_missing(observed: Observed) -> bool:
    if names.FINALIZER_COPIES not in observed.session.finalizers:
        return False
    trainer = observed.trainer
    if trainer.report is None or trainer.unreachable_since is not None:
        return bool(observed.pods) and _may_have_states(observed)
    return trainer.report.copies is not None and trainer.report.copies.pending > 0


def _may_have_states(observed: Observed) -> bool:
    """Whether a session that does not answer may have something to copy.

    Clients get through to it once its status has what a pod has told of storage and base model, and not before: of
    their work there is none until then. A container that has begun may be about to tell.
    """
    status = observed.session.status
    written = status.base_model is not None or bool(status.storage and status.storage.lineage)
    told = written or observed.trainer.report is not None
    return told or any(pod.container.begun for pod in observed.pods)


def finalizers(observed: Observed) -> tuple[str, ...] | None:
    """The finalizers that the object is to have; None where it has them."""
    session = observed.session
    others = tuple(name for name in session.finalizers if name != names.FINALIZER_COPIES)
    if session.deleting:
        wanted = waits(observed)
    else:
        wanted = session.spec is not None and session.spec.deletion.wait_for_copies
    if wanted is (names.FINALIZER_COPIES in session.finalizers):
        return None
    return (*others, names.FINALIZER_COPIES) if wanted else others


PAUSED = Aspect(
    False,
    names.REASON_PAUSED,
    f'the annotation {names.ANNOTATION_PAUSED} is "true": nothing is changed, and nothing that is lost is replaced',
)


def paused(observed: Observed) -> TrainingSessionStatus:
    """The status of a session of which nothing is to be changed: what was true stays written, but for one condition."""
    before = observed.session.status
    unknown = Aspect(None, names.REASON_PAUSED, PAUSED.message)
    known = {condition.type for condition in before.conditions}
    missing = {kind: unknown for kind in names.CONDITION_TYPES if kind not in known}
    return _with(observed, before, missing | {names.CONDITION_RECONCILING: PAUSED})


def waiting(observed: Observed, desired: TrainingSessionStatus) -> TrainingSessionStatus:
    """The status of a session whose deletion waits."""
    until = deadline(observed)
    message = (
        f"the deletion waits for {_missing_copies(observed)}, until {format_time(until) if until else 'now'} at most"
    )
    return _with(observed, desired, {names.CONDITION_RECONCILING: Aspect(True, names.REASON_DELETION_WAITS, message)})


def _missing_copies(observed: Observed) -> str:
    copies = observed.trainer.report.copies if observed.trainer.report else None
    return f"{copies.pending} copies" if copies else "copies that its trainer has not told of"


def _with(observed: Observed, base: TrainingSessionStatus, aspects: dict[str, Aspect]) -> TrainingSessionStatus:
    """The status with some of its conditions replaced."""
    listed = conditions.update(
        observed.session.status.conditions, aspects, generation=observed.session.generation, now=observed.now
    )
    changed = {condition.type: condition for condition in listed}
    kept = [changed.pop(condition.type, condition) for condition in base.conditions]
    return base.model_copy(update={"conditions": [*kept, *changed.values()]})
