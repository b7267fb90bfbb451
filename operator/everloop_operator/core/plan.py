"""What should happen to a TrainingSession, decided from one complete observation. No I/O, no clock, no memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from everloop_operator.api.training_session import CheckpointsSpec, TrainingSessionSpec
from everloop_operator.api.training_session_status import TrainingSessionStatus

from . import children, claims, ending, events, health, lifecycle, losses, node_health, recoveries, status, volumes
from .decision import Decision, decide
from .decision import Settings as Settings
from .evictions import evicted_after
from .observed import Observed, Pod, Session

ENDED_RECHECK_SECONDS = 1.0
"""How soon a session is looked at again that has just come to its end."""
CLAIM_RECHECK_SECONDS = 10.0
"""Claims are not watched: how soon a claim that is not in order is looked at again."""


@dataclass(frozen=True, slots=True)
class PodDeletion:
    """Remove a pod, if it still has this UID. `force` removes it from the API without waiting for its kubelet."""

    name: str
    uid: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class Poll:
    """Ask the server of this pod for its report, every so many seconds."""

    ip: str
    pod_uid: str
    attempt: int
    every_seconds: float
    snapshot: str = ""
    """Name of the request to write snapshots of all models, because the pod will be removed; '' for none.
    A request of the same name is one request, however often it is made."""
    checkpoints: CheckpointsSpec | None = None
    """How it is to take automatic checkpoints from now on; None if it does already."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a pass does, in this order: finalizers and nothing else, or token secret, claim, pod, disruption budget,
    deletions, status, events, the end of the object itself.
    """

    token_attempt: int | None = None
    """The attempt whose token secret must exist; None too while its container runs, which has it mounted."""
    create_claim: Mapping[str, Any] | None = None
    """The journal's claim, where there is surely none."""
    create_pod: Mapping[str, Any] | None = None
    disruption_budget: Mapping[str, Any] | None = None
    """The PodDisruptionBudget that must exist for the current pod."""
    delete_pods: tuple[PodDeletion, ...] = ()
    stale_tokens: tuple[int, ...] = ()
    """Attempts whose token secret nobody needs any more."""
    status: TrainingSessionStatus | None = None
    """The status to be; None leaves it as it is."""
    events: tuple[events.Event, ...] = ()
    """To be posted once the status that they tell of is written."""
    finalizers: tuple[str, ...] | None = None
    """The finalizers that the object is to have; None leaves them as they are."""
    delete_session: bool = False
    """Remove the object itself."""
    poll: Poll | None = None
    requeue_after: float | None = None
    """Seconds after which time alone may change the decision."""

    @property
    def needs_current(self) -> bool:
        """Whether it does what no version keeps from being done because of an object that is not so any more."""
        return bool(self.create_pod or self.delete_pods or self.delete_session)


def plan(observed: Observed, settings: Settings) -> Plan:
    """The whole decision."""
    session = observed.session
    if session.deleting and not ending.waits(observed):
        # The children go by their owner references.
        return Plan(finalizers=ending.finalizers(observed), events=ending.given_up(observed))
    if session.spec is None:
        return Plan(status=status.invalid(observed))
    if session.paused and not session.deleting:
        return Plan(status=ending.paused(observed), poll=_watch(observed))
    spec = session.spec
    decision = decide(observed, spec, settings)
    avoid = losses.avoided_nodes(observed, decision.loss, spec.recovery.avoid_seconds) if decision.create else []
    body = None
    if decision.create:
        body = children.pod(
            session,
            spec,
            decision.attempt,
            image=settings.image,
            avoid=avoid,
            shun=node_health.avoided(observed),
            evicted_after=evicted_after(settings.node_lost_seconds, nodes_watched=observed.nodes_watched),
        )
    deletions, forced = old_pods(observed, spec, decision)
    verdict = node_health.judge(observed, decision.pod, settings.fleet_cap)
    if decision.rest:
        resting = health.Resting(decision.rest.state, decision.rest.why, settled=not observed.pods)
        state = health.at_rest(observed, spec, resting)
    else:
        state = health.assess(
            observed,
            spec,
            health.Attempt(decision.attempt, decision.pod, decision.loss, decision.lost, decision.exhausted, verdict),
            refusal=None if decision.create else observed.refusal,
        )
    desired = status.build(observed, spec, decision.attempt, decision.pod, decision.budgets, state, settings.endpoint)
    kept = lifecycle.record(observed, decision.rest, resumed=decision.attempt > session.status.attempt)
    desired = desired.model_copy(update={"leaving": decision.leaving, "rest": kept, "failure": decision.failure})
    if session.deleting:
        desired = ending.waiting(observed, desired)
    desired, merged = status.with_recoveries(
        observed, desired, decision.pod, decision.loss if decision.attempt > session.status.attempt else None, state
    )
    request = verdict.request if verdict and verdict.moves else ""
    return Plan(
        token_attempt=_token_attempt(decision),
        create_claim=volumes.journal_claim(session, spec) if claims.missing(observed, spec) else None,
        create_pod=body,
        disruption_budget=_disruption_budget(session, spec, decision),
        delete_pods=deletions,
        stale_tokens=_stale_tokens(session.status, decision),
        status=desired,
        events=events.tell(observed, desired, decision.loss, merged, avoid=avoid, created=body, forced=forced),
        finalizers=ending.finalizers(observed),
        delete_session=decision.rest is not None and lifecycle.expired(observed, spec),
        poll=_poll(
            decision,
            state,
            snapshot=decision.leaving.request if decision.leaving else request,
            checkpoints=_untold(observed, spec),
        ),
        requeue_after=_requeue_after(observed, spec, decision, state, verdict, settings, desired),
    )


def _token_attempt(decision: Decision) -> int | None:
    if decision.rest or (decision.pod and decision.pod.container.running):
        return None
    return decision.attempt or None


def _disruption_budget(session: Session, spec: TrainingSessionSpec, decision: Decision) -> Mapping[str, Any] | None:
    pod = decision.pod
    if pod is None or decision.lost or not spec.pod.disruption_budget:
        return None
    return children.disruption_budget(session, pod.attempt, pod.uid)


def old_pods(
    observed: Observed, spec: TrainingSessionSpec, decision: Decision
) -> tuple[tuple[PodDeletion, ...], dict[str, str]]:
    """Deletions of replaced pods, and for each forced one the reason by name.

    A new attempt never waits for them: the journal keeps them from writing.
    """
    deletions: list[PodDeletion] = []
    forced: dict[str, str] = {}
    for pod in observed.pods:
        if pod.attempt >= decision.attempt and not decision.rest:
            continue
        if pod.deletion_requested is None:
            deletions.append(PodDeletion(pod.name, pod.uid))
            continue
        why = losses.proof_of_death(observed, pod)
        due = force_due(observed, spec, pod)
        if not why and due and observed.now >= due:
            why = f"it was deleted {spec.recovery.force_delete_after_seconds} s ago, and the journal fences it off"
        if why:
            deletions.append(PodDeletion(pod.name, pod.uid, force=True))
            forced[pod.name] = why
    return tuple(deletions), forced


def force_due(observed: Observed, spec: TrainingSessionSpec, pod: Pod) -> datetime | None:
    """When a pod in deletion may be removed without proof of death; None if never."""
    if pod.deletion_requested is None or claims.fence_mode(observed, spec) != "SharedPosix":
        return None
    return pod.deletion_requested + timedelta(seconds=spec.recovery.force_delete_after_seconds)


def _stale_tokens(recorded: TrainingSessionStatus, decision: Decision) -> tuple[int, ...]:
    """The few attempts that this pass ends. A pod of theirs that runs on has its token mounted, and starts no more.

    They are removed before the status tells that the attempts are over: a pass that breaks off is made up for, and one
    that finds the status written, of an operator that has just started too, has nothing to remove.
    """
    first = recorded.attempt + 1 if recorded.rest else recorded.attempt
    end = decision.attempt + 1 if decision.rest else decision.attempt
    return tuple(range(max(1, first, end - 5), end))


def _refill(spec: TrainingSessionSpec, decision: Decision) -> datetime | None:
    """When the budget that is used up allows more."""
    if decision.exhausted == "application":
        # Of failures in a pod that is kept, so many as the limit says are allowed, and not one fewer.
        limits = spec.recovery.application
        over = limits if decision.lost else limits.model_copy(update={"max_attempts": limits.max_attempts + 1})
        return recoveries.refills_at(over, decision.budgets.application)
    return recoveries.refills_at(spec.recovery.infrastructure, decision.budgets.infrastructure)


def _watch(observed: Observed) -> Poll | None:
    """Goes on asking a pod of which nothing is to be changed."""
    pod = max(observed.pods, key=lambda pod: pod.attempt, default=None)
    if pod is None or not pod.ip or pod.terminal:
        return None
    return Poll(pod.ip, pod.uid, pod.attempt, 3.0)


def _untold(observed: Observed, spec: TrainingSessionSpec) -> CheckpointsSpec | None:
    """How the server is to take automatic checkpoints, where it says that it does otherwise."""
    report = observed.trainer.report
    now, wanted = report.checkpoints if report else None, spec.checkpoints
    if now is None or (now.every_seconds, now.keep_last) == (wanted.every_seconds, wanted.keep_last):
        return None
    return wanted


def _poll(
    decision: Decision, state: health.Health, *, snapshot: str, checkpoints: CheckpointsSpec | None
) -> Poll | None:
    pod = decision.pod
    if pod is None or not pod.ip or pod.terminal:
        return None
    # A lost pod that can't be replaced may come back with its node.
    every = 3.0 if state.serving and not snapshot else 1.0
    return Poll(pod.ip, pod.uid, pod.attempt, every, snapshot, checkpoints)


def _expiry(observed: Observed, spec: TrainingSessionSpec, desired: TrainingSessionStatus) -> datetime | None:
    """By the status that this pass writes, because our own writes wake nobody; soon, if that has just ended it."""
    due = lifecycle.expiry(observed, spec, desired)
    before = observed.session.status
    known = lifecycle.expiry(observed, spec, before) and before.phase == desired.phase
    return due if due is None or known else max(due, observed.now + timedelta(seconds=ENDED_RECHECK_SECONDS))


def _requeue_after(
    observed: Observed,
    spec: TrainingSessionSpec,
    decision: Decision,
    state: health.Health,
    verdict: node_health.Verdict | None,
    settings: Settings,
    desired: TrainingSessionStatus,
) -> float | None:
    times: list[datetime] = list(state.deadlines)
    pod = decision.pod
    node = observed.nodes.get(pod.node) if pod and pod.node else None
    if node and node.not_ready_since and decision.loss is None:
        times.append(node.not_ready_since + timedelta(seconds=settings.node_lost_seconds))
    times.extend(node_health.due(observed, pod))
    if verdict and verdict.moves:
        times.append(node_health.checkpoint_deadline(verdict, spec.recovery.checkpoint_deadline_seconds))
    if pod and pod.unschedulable_since and pod.avoided_nodes:
        times.append(pod.unschedulable_since + timedelta(seconds=losses.AVOIDANCE_PATIENCE_SECONDS))
    for old in observed.pods:
        due = force_due(observed, spec, old) if old.attempt < decision.attempt or decision.rest else None
        if due:
            times.append(due)
    times += filter(None, (_expiry(observed, spec, desired), ending.deadline(observed)))
    idle = lifecycle.idle_due(observed, spec)
    if idle and pod:
        times.append(idle)
    if decision.leaving:
        times.append(lifecycle.deadline(decision.leaving, spec.recovery.checkpoint_deadline_seconds))
    if decision.retry_at:
        times.append(decision.retry_at)
    if decision.exhausted:
        times += filter(None, (_refill(spec, decision),))
    running = observed.trainer.running_since
    if running and pod:
        times.append(losses.due(running, spec.deadlines.progress_seconds))
    mounting = claims.recheck(observed, pod)
    if mounting:
        times.append(mounting)
    if not decision.rest and state.volumes.status is not True:
        times.append(observed.now + timedelta(seconds=CLAIM_RECHECK_SECONDS))
    if observed.refusal:
        times.append(observed.refusal.time + timedelta(seconds=observed.refusal.patience_seconds))
    coming = [(time - observed.now).total_seconds() for time in times if time > observed.now]
    return min(coming, default=None)
