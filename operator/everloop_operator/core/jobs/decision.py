"""Which driver is to be: the current one, its successor, none yet, or none any more."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from everloop_operator.api import names
from everloop_operator.api.rl_job import RLJobSpec
from everloop_operator.api.rl_job_status import JobBudgetsStatus
from everloop_operator.core import recoveries
from everloop_operator.core.observed import within

from . import children, losses
from .losses import Loss
from .observed import Driver, ObservedJob


@dataclass(frozen=True, slots=True)
class Decision:
    """Which attempt is to be, and how that came about."""

    attempt: int
    """The current attempt after this pass; 0 while none could be made."""
    driver: Driver | None
    """Its pod, if it exists already."""
    create: bool
    loss: Loss | None
    """Why the attempt before is over, or why this one is, if it can't be replaced now."""
    budgets: JobBudgetsStatus
    lost: bool = False
    """Whether this attempt is over, but can't be replaced now."""
    exhausted: str = ""
    """The budget that is used up: `infrastructure` refills, `application` ends the job."""
    retry_at: datetime | None = None
    """When it may be replaced, if only time is in the way."""


def decide(observed: ObservedJob, spec: RLJobSpec, *, may_start: bool, lost_after: float) -> Decision:
    """Whether the current driver goes on, is replaced, or stays lost.

    Args:
        observed: the observation of a job that is neither suspended nor finished.
        spec: its spec.
        may_start: whether there is a session that serves.
        lost_after: seconds for which a node may be not Ready.
    """
    recorded = observed.job.status
    driver, current = observed.current, observed.attempt
    budgets = _budgets(observed, spec)
    if current == 0:
        return _next(observed, 0, None, None, budgets, may_start=may_start)
    wanted = children.template_hash(spec)
    loss = losses.find(observed, current, driver, wanted, lost_after)
    if loss is None:
        loss = losses.silent(observed, spec)
    if loss and recorded.loss and current == recorded.attempt:
        # What is seen of a driver that has been waiting for its successor is what became of it, and not the cause.
        loss = losses.recorded(recorded.loss)
    if loss is None:
        cause = _cause(observed, recorded.attempt, wanted) if 0 < recorded.attempt < current else None
        if cause:
            budgets = charge(budgets, cause, observed.now)
        return Decision(current, driver, create=False, loss=cause, budgets=budgets)
    state = {"infrastructure": budgets.infrastructure, "application": budgets.application}.get(loss.budget)
    if state is not None and state.used >= state.limit:
        return Decision(current, driver, create=False, loss=loss, budgets=budgets, lost=True, exhausted=loss.budget)
    return _next(observed, current, driver, loss, budgets, may_start=may_start)


def _cause(observed: ObservedJob, attempt: int, wanted: str) -> Loss:
    """Why an attempt has a successor that the status does not know: the pass that made it came no further."""
    if observed.job.status.loss:
        return losses.recorded(observed.job.status.loss)
    before = next((driver for driver in observed.drivers if driver.pod.attempt == attempt), None)
    found = losses.find(observed, attempt, before, wanted, 0.0)
    return found or Loss(names.RECOVERY_POD_DELETED, f"attempt {attempt} has been replaced", "none")


def _next(
    observed: ObservedJob,
    current: int,
    driver: Driver | None,
    loss: Loss | None,
    budgets: JobBudgetsStatus,
    *,
    may_start: bool,
) -> Decision:
    waiting = Decision(current, driver, create=False, loss=loss, budgets=budgets, lost=loss is not None)
    refusal = observed.refusal
    refused = refusal is not None and refusal.generation == observed.job.generation
    if refused and refusal and within(observed.now - refusal.time, refusal.patience_seconds):
        return waiting
    if not may_start:
        return waiting
    if loss and loss.by_itself:
        state = budgets.application if loss.budget == "application" else budgets.infrastructure
        due = recoveries.patient_until(state, observed.now)
        if due and observed.now < due:
            return Decision(current, driver, create=False, loss=loss, budgets=budgets, lost=True, retry_at=due)
    if loss:
        budgets = charge(budgets, loss, observed.now)
    attempt = 1 + max(current, *observed.taken_attempts, 0)
    return Decision(attempt, None, create=True, loss=loss, budgets=budgets)


def _budgets(observed: ObservedJob, spec: RLJobSpec) -> JobBudgetsStatus:
    before = observed.job.status.budgets or JobBudgetsStatus()
    return JobBudgetsStatus(
        infrastructure=recoveries.budget(spec.recovery.infrastructure, before.infrastructure, observed.now),
        application=recoveries.budget(spec.recovery.application, before.application, observed.now),
    )


def charge(budgets: JobBudgetsStatus, loss: Loss, now: datetime) -> JobBudgetsStatus:
    """The budgets after this loss."""
    if loss.budget == "none":
        return budgets
    state = budgets.application if loss.budget == "application" else budgets.infrastructure
    return budgets.model_copy(update={loss.budget: recoveries.with_failure(state, now)})
