"""How a session is doing: whether it serves, what it waits for, and whether it is stuck."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import Recovery

from . import claims, copies, failure_classes, failures, fetching
from .aspect import Aspect as Aspect
from .failure_classes import Exhausted
from .losses import Loss
from .node_health import Verdict
from .observed import Observed, Pod, within
from .refusals import Refusal

UNREACHABLE_PATIENCE_SECONDS = 10.0
"""How long a server that served may not answer before that counts: a busy machine may delay an answer."""
CRASH_LOOP_RESTARTS = 3
CRASH_MEMORY_SECONDS = 600.0
"""How long an exit explains why a server does not serve; longer than the longest back-off of a kubelet."""


NODES_NOT_WATCHED = (
    "this installation may not read nodes: a lost node shows only when Kubernetes evicts the pod, its health not at all"
)


@dataclass(frozen=True, slots=True)
class Resting:
    """A session that is to have no pod."""

    phase: str
    """The phase that it comes to once every pod is gone."""
    why: str
    settled: bool
    """Whether every pod is gone."""


@dataclass(frozen=True, slots=True)
class Health:
    """The judgement that conditions and phase are made of."""

    serving: bool
    stalled: Aspect | None
    """Why nothing will change by itself; None otherwise."""
    waiting: Aspect
    """What a session that does not serve waits for."""
    pods: Aspect
    volumes: Aspect
    base_model: Aspect
    nodes: Aspect
    copies: Aspect
    recovering: bool
    """Whether it has served, or an attempt before it has been lost."""
    moving: bool
    """Whether it has left its node in good order, and does not serve on another yet."""
    deadlines: tuple[datetime, ...]
    """When time alone may change the judgement."""
    resting: Resting | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt that is current after this pass."""

    number: int
    pod: Pod | None
    loss: Loss | None
    """Why it is over, or why the one before it was."""
    lost: bool
    """Whether it is over itself, but can't be replaced now."""
    exhausted: Exhausted
    """The budget that is used up."""
    verdict: Verdict | None = None
    """What counts against its node."""


def assess(observed: Observed, spec: TrainingSessionSpec, attempt: Attempt, *, refusal: Refusal | None) -> Health:
    """Judges the current attempt; `refusal` is why there is no next pod, if that was to be made."""
    pod = attempt.pod
    serving = pod is not None and not attempt.lost and serves(observed, attempt.number, pod)
    pods = _pods(observed, pod, refusal)
    volumes = claims.judge(observed, spec, pod, _storage_error(observed, pod))
    fetch = fetching.judge(pod, observed.trainer.report)
    blockers = (volumes, fetch or pods)
    before = observed.session.status
    served = (names.PHASE_RUNNING, names.PHASE_RECOVERING, names.PHASE_MOVING)
    recovering = attempt.loss is not None or _opened(observed, attempt) is not None or before.phase in served
    deadlines = [] if serving or attempt.lost else _deadlines(observed, spec, pod, blockers)
    times = [time for time, _ in deadlines]
    if pod and observed.trainer.unreachable_since:
        times.append(observed.trainer.unreachable_since + _seconds(UNREACHABLE_PATIENCE_SECONDS))
    return Health(
        serving=serving,
        stalled=None if serving else _stalled(observed, attempt, deadlines, refusal, volumes),
        waiting=_waiting(observed, attempt, blockers, recovering=recovering),
        pods=pods,
        volumes=volumes,
        base_model=_base_model(observed, attempt.number, pod),
        nodes=_nodes(observed, pod, attempt),
        copies=copies.judge(observed, spec),
        recovering=recovering,
        moving=_moving(observed, attempt),
        deadlines=tuple(times),
    )


def at_rest(observed: Observed, spec: TrainingSessionSpec, resting: Resting) -> Health:
    """Judges a session that is to have no pod."""
    absent = Aspect(False, resting.phase, resting.why)
    was = next((c for c in observed.session.status.conditions if c.type == names.CONDITION_STALLED), None)
    failed = was if resting.phase == names.PHASE_FAILED else None
    return Health(
        serving=False,
        stalled=Aspect(True, failed.reason, failed.message) if failed else None,
        waiting=Aspect(False, names.REASON_STOPPING, f"the pod is being removed: {resting.why}"),
        pods=absent,
        volumes=claims.judge(observed, spec, None, ""),
        base_model=absent,
        nodes=Aspect(None, resting.phase, "no pod, no node"),
        copies=copies.judge(observed, spec),
        recovering=False,
        moving=False,
        deadlines=(),
        resting=resting,
    )


def _opened(observed: Observed, attempt: Attempt) -> Recovery | None:
    return next((r for r in observed.session.status.recoveries if r.id == f"a{attempt.number}"), None)


def _moving(observed: Observed, attempt: Attempt) -> bool:
    opened = _opened(observed, attempt)
    reason = attempt.loss.reason if attempt.loss else (opened.reason if opened else "")
    return reason == names.RECOVERY_NODE_HEALTH


def serves(observed: Observed, attempt: int, pod: Pod) -> bool:
    """Whether the pod of this attempt serves, by what its trainer said last."""
    trainer, before = observed.trainer, observed.session.status
    patient = trainer.unreachable_since is None or (
        within(observed.now - trainer.unreachable_since, UNREACHABLE_PATIENCE_SECONDS)
    )
    if not patient:
        return False
    if trainer.report is not None:
        incarnation = trainer.report.incarnation
        return trainer.report.serving and incarnation is not None and incarnation.attempt == attempt
    was = next((c.status for c in before.conditions if c.type == names.CONDITION_SERVING), "Unknown")
    return was == "True" and recorded_counts(observed, pod)


def recorded_counts(observed: Observed, pod: Pod | None) -> bool:
    """Whether the status still holds for what only the trainer can say.

    An operator that has just started has no answer of this pod yet: what was true stays true until there is one.
    """
    recorded = observed.session.status.pod
    return observed.trainer.report is None and recorded is not None and pod is not None and recorded.uid == pod.uid


def _pods(observed: Observed, pod: Pod | None, refusal: Refusal | None) -> Aspect:
    if pod is None:
        if refusal:
            reason = names.REASON_POD_INVALID if refusal.settled else names.REASON_POD_CREATING
            return Aspect(False, reason, refusal.message)
        return Aspect(False, names.REASON_POD_CREATING, "the pod is being created")
    if pod.ready:
        return Aspect(True, names.REASON_AS_EXPECTED, f"pod {pod.name} is ready")
    if pod.unschedulable_since:
        return Aspect(False, names.REASON_UNSCHEDULABLE, f"pod {pod.name}: {pod.unschedulable_message}")
    if pod.gates:
        return Aspect(False, names.REASON_SCHEDULING_GATED, f"pod {pod.name} is held back by {', '.join(pod.gates)}")
    container = pod.container
    if container.waiting_reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        message = f"pod {pod.name}: {container.waiting_reason}: {container.waiting_message}"
        return Aspect(False, names.REASON_IMAGE_UNAVAILABLE, message)
    if container.waiting_reason in ("CreateContainerConfigError", "CreateContainerError"):
        message = f"pod {pod.name}: {container.waiting_reason}: {container.waiting_message}"
        return Aspect(False, names.REASON_CONTAINER_INVALID, message)
    if _crashed(observed, pod):
        return Aspect(False, names.REASON_CRASH_LOOP, f"pod {pod.name}: {_exit(pod)}")
    waiting = ": ".join(filter(None, (container.waiting_reason, container.waiting_message)))
    return Aspect(False, names.REASON_POD_NOT_READY, f"pod {pod.name}: {waiting or 'not ready'}")


def _storage_error(observed: Observed, pod: Pod | None) -> str:
    report, before = observed.trainer.report, observed.session.status.storage
    if report:
        return report.storage.error
    return before.error if before and recorded_counts(observed, pod) else ""


def _base_model(observed: Observed, attempt: int, pod: Pod | None) -> Aspect:
    report = observed.trainer.report
    if pod and report and report.base_model and report.base_model.manifest_sha256 and report.engine.pid is not None:
        return Aspect(True, names.REASON_BASE_MODEL_LOADED, f"{report.base_model.name} is loaded")
    was = next((c for c in observed.session.status.conditions if c.type == names.CONDITION_BASE_MODEL_READY), None)
    if was and was.status == "True" and recorded_counts(observed, pod):
        return Aspect(True, was.reason, was.message)
    fetched = fetching.judge(pod, observed.trainer.report)
    if fetched:
        return fetched
    return Aspect(False, names.REASON_BASE_MODEL_LOADING, f"attempt {attempt} has not loaded the base model yet")


def _nodes(observed: Observed, pod: Pod | None, attempt: Attempt) -> Aspect:
    if not observed.nodes_watched:
        return Aspect(None, names.REASON_NODES_NOT_WATCHED, NODES_NOT_WATCHED)
    if pod is None or not pod.node:
        return Aspect(None, names.REASON_WAITING, "no node yet")
    node = observed.nodes.get(pod.node)
    if node is None:
        return Aspect(False, names.REASON_NODE_GONE, f"node {pod.node} no longer exists")
    if not node.ready or node.out_of_service:
        why = node.reason or "no reason given"
        message = attempt.loss.message if attempt.loss else f"node {node.name} is not Ready ({why})"
        return Aspect(False, names.REASON_NODE_NOT_READY, message)
    verdict = attempt.verdict
    if verdict and verdict.moves:
        return Aspect(False, names.REASON_NODE_UNHEALTHY, f"{verdict.message}; the session is about to leave it")
    if verdict:
        why = "; too many nodes show signals to leave it" if verdict.held_back else "; other nodes are preferred"
        return Aspect(False, names.REASON_NODE_AVOIDED, verdict.message + why)
    return Aspect(True, names.REASON_AS_EXPECTED, f"node {node.name} is Ready")


def _crashed(observed: Observed, pod: Pod) -> bool:
    container = pod.container
    if not container.exit_code or container.finished is None:
        return False
    return observed.now - container.finished < _seconds(CRASH_MEMORY_SECONDS)


def _exit(pod: Pod) -> str:
    container = pod.container
    message = container.exit_message[-600:] or container.exit_reason or "no message"
    return f"the trainer ended with exit code {container.exit_code}: {message}"


def _stalled(
    observed: Observed,
    attempt: Attempt,
    deadlines: list[tuple[datetime, Aspect]],
    refusal: Refusal | None,
    volumes: Aspect,
) -> Aspect | None:
    pod, loss = attempt.pod, attempt.loss
    if attempt.exhausted and loss:
        message = (
            f"nothing is left of spec.recovery.{attempt.exhausted}; the last cause: {loss.message} ({loss.reason})"
            f"{failure_classes.remedy(loss.reason)}"
        )
        return Aspect(True, names.REASON_BUDGET_EXHAUSTED, message)
    if volumes.reason == names.REASON_VOLUME_UNFIT:
        return Aspect(True, volumes.reason, volumes.message)
    if refusal and refusal.settled and (pod is None or attempt.lost):
        return Aspect(True, names.REASON_POD_INVALID, f"the pod was refused: {refusal.message}")
    failed = fetching.judge(pod, observed.trainer.report)
    if failed and pod and pod.fetch.restarts >= CRASH_LOOP_RESTARTS:
        return Aspect(True, failed.reason, failed.message)
    if pod and _crashed(observed, pod):
        if pod.container.exit_code == names.EXIT_STORAGE_MISMATCH:
            reason = names.REASON_STORAGE_MISMATCH
            return Aspect(True, reason, _exit(pod) + failure_classes.remedy(reason))
        if pod.container.restarts >= CRASH_LOOP_RESTARTS:
            found = observed.session.status.failure
            remedy = failure_classes.remedy(found.reason) if found and found.pod_uid == pod.uid else ""
            return Aspect(True, names.REASON_CRASH_LOOP, f"pod {pod.name}: {_exit(pod)}{remedy}")
    return next((aspect for time, aspect in deadlines if observed.now >= time), None)


def _deadlines(
    observed: Observed, spec: TrainingSessionSpec, pod: Pod | None, blockers: tuple[Aspect, Aspect]
) -> list[tuple[datetime, Aspect]]:
    """Deadlines of a pod that does not serve, each with what passing it means, in the words of what blocks it."""
    if pod is None:
        return []
    limits, (volumes, _) = spec.deadlines, blockers
    blocker = next((item for item in blockers if item.status is False), None)
    if pod.unschedulable_since:
        lacking = failures.shortage(pod.unschedulable_message) or pod.unschedulable_message
        if volumes.status is False:
            lacking = f"{lacking}; {volumes.message}"
        message = f"pod {pod.name} found no node for {limits.unschedulable_seconds} s: {lacking}"
        message += failure_classes.remedy(names.REASON_UNSCHEDULABLE)
        aspect = Aspect(True, names.REASON_UNSCHEDULABLE_DEADLINE, message)
        return [(pod.unschedulable_since + _seconds(limits.unschedulable_seconds), aspect)]
    if pod.scheduled is None:
        return []
    # The engine of a pod that served may be lost much later: then the clock starts with the loss.
    before = observed.session.status
    lost = next((c for c in before.conditions if c.type == names.CONDITION_SERVING and c.status == "False"), None)
    since = max(pod.scheduled, datetime.fromisoformat(lost.last_transition_time)) if lost else pod.scheduled
    if lost is None and before.phase == names.PHASE_RUNNING:
        since = observed.now
    message = f"pod {pod.name} did not serve within {limits.startup_seconds} s"
    if blocker:
        message += f": {blocker.message.removeprefix(f'pod {pod.name}: ')}{failure_classes.remedy(blocker.reason)}"
    else:
        message += f": {_trainer_says(observed, pod)}"
    return [(since + _seconds(limits.startup_seconds), Aspect(True, names.REASON_STARTUP_DEADLINE, message))]


def _waiting(observed: Observed, attempt: Attempt, blockers: tuple[Aspect, Aspect], *, recovering: bool) -> Aspect:
    reason = names.REASON_RECOVERING if recovering else names.REASON_STARTING
    story, pod = f"attempt {attempt.number}", attempt.pod
    opened = _opened(observed, attempt)
    if attempt.loss and not attempt.lost:
        return Aspect(False, reason, f"{story} takes over: {attempt.loss.message}")
    if attempt.loss:
        story = f"{story}: {attempt.loss.message}"
    elif opened:
        story = f"{story} took over ({opened.reason}{' on ' + opened.node if opened.node else ''})"
    blocker = next((item for item in blockers if item.status is False), None)
    if blocker:
        return Aspect(False, reason, f"{story}: {blocker.message}")
    return Aspect(False, reason, f"{story}: {_trainer_says(observed, pod)}")


def _trainer_says(observed: Observed, pod: Pod | None) -> str:
    trainer = observed.trainer
    if pod and trainer.report and trainer.unreachable_since is None:
        return f"the trainer is {trainer.report.state}"
    return f"the trainer does not answer yet ({trainer.problem or 'not asked yet'})"


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
