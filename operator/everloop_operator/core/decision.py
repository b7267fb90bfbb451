"""Which attempt of a TrainingSession is to be: the current one, the next one, or none. No I/O, no clock, no memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import BudgetsStatus, FailureStatus, LeavingStatus

from . import children, claims, failures, lifecycle, losses, recoveries
from .failure_classes import Exhausted, FailureClass
from .lifecycle import Rest
from .losses import Loss
from .observed import Observed, Pod, within


@dataclass(frozen=True, slots=True)
class Settings:
    """What an installation decides for all sessions."""

    image: str
    endpoint: str
    node_lost_seconds: float
    fleet_cap: float = 0.2
    """Share of the nodes with session pods that may be left at a time for their health, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which attempt is to be, and how that came about."""

    attempt: int
    """The current attempt after this pass; 0 while none could be made."""
    pod: Pod | None
    """Its pod, if it exists already."""
    create: bool
    loss: Loss | None
    """Why the attempt before is over, or why this one is, if it can't be replaced or its budget is used up."""
    exhausted: Exhausted
    budgets: BudgetsStatus
    failure: FailureStatus | None
    """The last failure of a container."""
    failed: FailureClass | None = None
    """Its class, if this pass is the first that sees it."""
    lost: bool = False
    """Whether this attempt is over, but can't be replaced now."""
    retry_at: datetime | None = None
    """When it may be replaced, if only time is in the way."""
    leaving: LeavingStatus | None = None
    """Snapshots that are written before the pod may be removed in good order."""
    rest: Rest | None = None
    """Why there is to be no pod, once none has to stay any longer."""


def decide(observed: Observed, spec: TrainingSessionSpec, settings: Settings) -> Decision:
    """Whether the current attempt goes on, is replaced, or stays lost for lack of a budget."""
    recorded = observed.session.status
    current = max([recorded.attempt, *(pod.attempt for pod in observed.pods)])
    pod = next((pod for pod in observed.pods if pod.attempt == current), None)
    failure, failed = failures.latest(observed, pod)
    budgets = recoveries.budgets(spec.recovery, recorded.budgets, observed.now)
    if failed:
        budgets = recoveries.charged(budgets, failed.budget, observed.now)
    goes_on = Decision(
        current, pod, create=False, loss=None, exhausted="", budgets=budgets, failure=failure, failed=failed
    )
    limits = losses.Limits(
        children.fitting_hashes(spec),
        settings.node_lost_seconds,
        spec.recovery.checkpoint_deadline_seconds,
        settings.fleet_cap,
        spec.deadlines.progress_seconds,
    )

    rest = lifecycle.rest(observed, spec)
    if rest:
        kept = lifecycle.leaving(observed, rest.request) if pod else None
        if pod and kept and not lifecycle.may_leave(observed, pod, kept, spec.recovery.checkpoint_deadline_seconds):
            return replace(goes_on, leaving=kept)
        return replace(goes_on, pod=None, rest=rest)
    if current == 0 or (lifecycle.resumes(recorded) and current == recorded.attempt):
        return _next(observed, spec, replace(goes_on, pod=None))
    loss = losses.find(observed, current, pod, limits)
    if loss and pod and loss.reason == names.RECOVERY_SPEC_CHANGED:
        kept = lifecycle.leaving(observed, f"spec-{children.template_hash(spec)}")
        if not lifecycle.may_leave(observed, pod, kept, limits.checkpoint_seconds):
            return replace(goes_on, leaving=kept)
    if loss is None:
        cause = None
        if 0 < recorded.attempt < current and not lifecycle.resumes(recorded):
            # A pod that is ahead of the status was made by a pass that did not come to write it: tell its story now.
            # That pass has waited for the node already, and a restarted operator no longer knows since when.
            before = next((item for item in observed.pods if item.attempt == recorded.attempt), None)
            at_once = replace(limits, node_lost_seconds=0.0, checkpoint_seconds=0.0)
            cause = losses.find(observed, recorded.attempt, before, at_once)
            cause = cause or losses.replaced(recorded.attempt, before)
        if cause:
            budgets = recoveries.charged(budgets, cause.budget, observed.now)
        elif failure and budgets.application.used > budgets.application.limit:
            return replace(goes_on, loss=Loss(failure.reason, failure.message), exhausted="application")
        return replace(goes_on, loss=cause, budgets=budgets)
    if loss.budget != "none" and recoveries.used_up(budgets, loss.budget):
        return replace(goes_on, loss=loss, exhausted=loss.budget, lost=True)
    return _next(observed, spec, replace(goes_on, loss=loss))


def _next(observed: Observed, spec: TrainingSessionSpec, over: Decision) -> Decision:
    """The next attempt, unless something holds it back for now."""
    refusal, loss, budgets = observed.refusal, over.loss, over.budgets
    if claims.unfit(observed, spec) or (
        refusal
        and refusal.generation == observed.session.generation
        and within(observed.now - refusal.time, refusal.patience_seconds)
    ):
        return replace(over, lost=loss is not None)
    if loss and loss.backs_off:
        due = recoveries.patient_until(budgets.infrastructure, observed.now)
        if due and observed.now < due:
            return replace(over, lost=True, retry_at=due)
    if loss:
        budgets = recoveries.charged(budgets, loss.budget, observed.now)
    attempt = 1 + max(over.attempt, losses.reported_epoch(observed, over.pod), *observed.taken_attempts)
    return replace(over, attempt=attempt, pod=None, create=True, budgets=budgets)
