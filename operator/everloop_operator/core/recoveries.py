"""The record of interruptions (`status.recoveries`) and the budget that they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from everloop_operator.api import names
from everloop_operator.api.training_session import Budget, RecoverySpec
from everloop_operator.api.training_session_status import (
    MAX_FAILURES,
    MAX_RECOVERIES,
    BudgetsStatus,
    BudgetStatus,
    Recovery,
)

from .failure_classes import Budgeted
from .losses import Loss
from .observed import within
from .projections import format_time
from .report import RecoveryReport, TrainerReport

IN_PLACE = frozenset({names.RECOVERY_ENGINE_LOST, names.RECOVERY_SERVER_RESTARTED})
PATIENCE_WINDOW_SECONDS = 600.0
LONGEST_PATIENCE_SECONDS = 60.0
REPLACED = "PodReplaced"
"""The trainer's word for taking over from a pod that was replaced."""


@dataclass(frozen=True, slots=True)
class Merged:
    """`entries` after a pass; `added` are new ones, `completed` those that got their figures now."""

    entries: tuple[Recovery, ...]
    added: tuple[Recovery, ...] = ()
    completed: tuple[Recovery, ...] = ()


def attempt_id(attempt: int) -> str:
    """Id of the entry of an attempt that took over."""
    return f"a{attempt}"


def opened(attempt: int, loss: Loss, now: datetime) -> Recovery:
    """The entry of an attempt that takes over now; its figures follow when it serves."""
    return Recovery(
        id=attempt_id(attempt),
        attempt=attempt,
        reason=loss.reason,
        rule=loss.rule or None,
        node=loss.node,
        time=format_time(now),
    )


def merge(
    entries: Sequence[Recovery], *, attempt: int, node: str, report: TrainerReport | None, serving: bool, now: datetime
) -> Merged:
    """Takes over what the trainer of the current attempt reports: figures of its own entry, and recoveries in place."""
    known = list(entries)
    added: list[Recovery] = []
    completed: list[Recovery] = []
    if report and serving:
        for index, entry in enumerate(known):
            if entry.id == attempt_id(attempt) and entry.seconds is None:
                known[index] = _complete(entry, report, now)
                completed.append(known[index])
    for item in report.recoveries if report else ():
        if item.reason in IN_PLACE and item.seconds is not None and _is_new(known, item):
            added.append(_in_place(item, attempt, node))
            known.append(added[-1])
    known.sort(key=lambda entry: datetime.fromisoformat(entry.time))
    return Merged(tuple(known[-MAX_RECOVERIES:]), tuple(added), tuple(completed))


def _complete(entry: Recovery, report: TrainerReport, now: datetime) -> Recovery:
    of_attempt = [item for item in report.recoveries if item.id.startswith(f"{entry.id}-")]
    # A server that was restarted before it had taken over reports the whole replay as its restart.
    own = [item for item in of_attempt if item.reason == REPLACED] or of_attempt
    seconds = max(0.0, (now - datetime.fromisoformat(entry.time)).total_seconds())
    figures: dict[str, object] = {"seconds": f"{seconds:.1f}"}
    if own:
        figures |= {
            "resumed_from": own[-1].resumed_from[:1024],
            "replayed_operations": max(0, own[-1].replayed_operations),
            "lost_operations": max(0, own[-1].lost_operations),
        }
    return entry.model_copy(update=figures)


def _is_new(known: Sequence[Recovery], item: RecoveryReport) -> bool:
    """The trainer goes on reporting what has already left a full list: only what is younger than the list is new."""
    if any(entry.id == item.id for entry in known):
        return False
    time = datetime.fromisoformat(item.time)
    return len(known) < MAX_RECOVERIES or time > min(datetime.fromisoformat(entry.time) for entry in known)


def _in_place(item: RecoveryReport, attempt: int, node: str) -> Recovery:
    return Recovery(
        id=item.id,
        attempt=attempt,
        reason=item.reason,
        node=node,
        resumed_from=item.resumed_from[:1024],
        replayed_operations=max(0, item.replayed_operations),
        lost_operations=max(0, item.lost_operations),
        seconds=item.seconds,
        time=item.time,
    )


def budget(limits: Budget, previous: BudgetStatus | None, now: datetime) -> BudgetStatus:
    """What is used of the budget now; failures that have left the window are forgotten."""
    oldest = now - timedelta(seconds=limits.window_seconds)
    failures = [time for time in (previous.failures if previous else []) if datetime.fromisoformat(time) > oldest]
    return BudgetStatus(used=len(failures), limit=limits.max_attempts, failures=failures)


def budgets(limits: RecoverySpec, previous: BudgetsStatus | None, now: datetime) -> BudgetsStatus:
    """What is used of both budgets now."""
    before = previous or BudgetsStatus()
    return BudgetsStatus(
        infrastructure=budget(limits.infrastructure, before.infrastructure, now),
        application=budget(limits.application, before.application, now),
    )


def charged(state: BudgetsStatus, kind: Budgeted, now: datetime) -> BudgetsStatus:
    """One more failure of this kind."""
    if kind == "infrastructure":
        return state.model_copy(update={kind: with_failure(state.infrastructure, now)})
    if kind == "application":
        return state.model_copy(update={kind: with_failure(state.application, now)})
    return state


def used_up(state: BudgetsStatus, kind: Budgeted) -> bool:
    """Whether a failure of this kind can't be made up for by another attempt."""
    of = state.application if kind == "application" else state.infrastructure
    return kind != "none" and of.used >= of.limit


def with_failure(state: BudgetStatus, now: datetime) -> BudgetStatus:
    """One more failure used the budget."""
    failures = [*state.failures, format_time(now)][-MAX_FAILURES:]
    return state.model_copy(update={"used": len(failures), "failures": failures})


def patient_until(state: BudgetStatus, now: datetime) -> datetime | None:
    """When the next try is due after a pod that failed by itself; None: at once.

    A node that turns every pod away (a device plugin that is not up yet) would use up the budget within seconds.
    """
    lately = [
        time for time in map(datetime.fromisoformat, state.failures) if within(now - time, PATIENCE_WINDOW_SECONDS)
    ]
    if not lately:
        return None
    return lately[-1] + timedelta(seconds=min(2.0 ** len(lately), LONGEST_PATIENCE_SECONDS))


def refills_at(limits: Budget, state: BudgetStatus) -> datetime | None:
    """When an exhausted budget allows the next attempt; None if it never does by itself."""
    # The limit may have been lowered since: enough must leave the window to get below it.
    surplus = len(state.failures) - limits.max_attempts
    if limits.max_attempts == 0 or surplus < 0:
        return None
    return datetime.fromisoformat(state.failures[surplus]) + timedelta(seconds=limits.window_seconds)
