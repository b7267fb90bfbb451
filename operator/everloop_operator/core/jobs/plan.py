"""What should happen to an RLJob, decided from one complete observation. No I/O, no clock, no memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from everloop_operator.api import names
from everloop_operator.api.rl_job import GoalSpec, RLJobSpec
from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core import recoveries
from everloop_operator.core.events import Event
from everloop_operator.core.evictions import evicted_after
from everloop_operator.core.plan import PodDeletion

from . import children, events, health, losses, outcome, status
from .decision import Decision, decide
from .observed import ObservedJob
from .outcome import Outcome
from .report import Point

FORCE_DELETE_SECONDS = 120
"""After which a replaced driver pod that does not go away is removed from the API without proof of its death. Its key
is void and its reports are not read, so it can do no harm."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What an installation decides for all jobs."""

    reader_image: str
    endpoint: str
    node_lost_seconds: float


@dataclass(frozen=True, slots=True)
class ProgressPoll:
    """Ask the progress reader of this pod for its report, every so many seconds."""

    ip: str
    pod_uid: str
    attempt: int
    every_seconds: float
    goal: GoalSpec | None = None


@dataclass(frozen=True, slots=True)
class JobPlan:
    """All that a pass does, in this order: session, pod, credentials, deletions, status, events."""

    apply_session: Mapping[str, Any] | None = None
    create_pod: Mapping[str, Any] | None = None
    credentials: int | None = None
    """The attempt whose API key is the job's, and whose secret must exist; None: the job has no key."""
    keep_key: bool = False
    """Whether the key, if there is one, stays as it is."""
    delete_pods: tuple[PodDeletion, ...] = ()
    delete_session: str = ""
    """UID of the job's own session, if that is to go."""
    stale_secrets: tuple[int, ...] = ()
    """Attempts whose secret has no pod any more."""
    status: RLJobStatus | None = None
    """The status to be; None leaves it as it is."""
    events: tuple[Event, ...] = ()
    poll: ProgressPoll | None = None
    requeue_after: float | None = None
    """Seconds after which time alone may change the decision."""

    @property
    def needs_current(self) -> bool:
        """Whether it does what no version keeps from being done because of an object that is not so any more."""
        return bool(self.create_pod or self.apply_session or self.delete_pods or self.delete_session)


def plan(observed: ObservedJob, settings: JobSettings) -> JobPlan:
    """The whole decision."""
    job = observed.job
    if job.deleting:
        return JobPlan()  # the children go by their owner references, and the key with its job
    if job.spec is None:
        return JobPlan(keep_key=True, status=status.invalid(observed))
    if job.status.finish_time is not None:
        return _after_the_end(observed, job.spec)
    ending = outcome.completed(observed, job.spec)
    if ending:
        return _end(observed, job.spec, ending, None)
    if job.spec.suspend:
        return _rest(observed, job.spec)
    return _go_on(observed, job.spec, settings)


def _after_the_end(observed: ObservedJob, spec: RLJobSpec) -> JobPlan:
    """Drivers end, and after a while everything else goes but the job itself."""
    due = outcome.removal_due(observed.job.status, spec)
    assert due is not None
    gone = observed.now >= due
    pods = _deletions(observed, [d.pod.attempt for d in observed.drivers if gone or not d.pod.terminal])
    return JobPlan(
        apply_session=None if gone else _session(observed, spec, rests=True),
        keep_key=_winding_up(observed),
        delete_pods=pods,
        delete_session=_own_session(observed, spec) if gone else "",
        stale_secrets=_stale_secrets(observed, observed.attempt + 1),
        status=status.kept(observed),
        requeue_after=None if gone else (due - observed.now).total_seconds(),
    )


def _end(observed: ObservedJob, spec: RLJobSpec, ending: Outcome, decision: Decision | None) -> JobPlan:
    """The job ends: first the status says so, and the passes after it act on that."""
    built = status.build(observed, spec, health.finished(observed, spec, ending), decision)
    desired = status.ended(built, observed.now)
    told = events.tell(observed, desired, None, session_created=False)
    return JobPlan(keep_key=True, status=desired, events=told, requeue_after=0.0)


def _rest(observed: ObservedJob, spec: RLJobSpec) -> JobPlan:
    desired = status.build(observed, spec, health.resting(observed, spec), None)
    told = events.tell(observed, desired, None, session_created=False)
    pods = _deletions(observed, [d.pod.attempt for d in observed.drivers])
    return JobPlan(
        apply_session=_session(observed, spec, rests=True),
        keep_key=_winding_up(observed),
        delete_pods=pods,
        stale_secrets=_stale_secrets(observed, observed.attempt + 1),
        status=desired,
        events=told,
        requeue_after=_force_wait(observed, [d.pod.attempt for d in observed.drivers]),
    )


def _winding_up(observed: ObservedJob) -> bool:
    """Whether the driver that is told to end may still save what it has: until it is gone its key is good."""
    return observed.current is not None and not observed.current.pod.terminal


def _go_on(observed: ObservedJob, spec: RLJobSpec, settings: JobSettings) -> JobPlan:
    seen = health.session(observed, spec)
    decision = decide(observed, spec, may_start=seen.status is True, lost_after=settings.node_lost_seconds)
    if decision.exhausted == "application" and decision.loss:
        cause = status.failure(observed, decision.loss)
        message = f"{decision.loss.message}, once more than spec.recovery.application allows; {cause.remedy}"
        return _end(observed, spec, Outcome(names.PHASE_FAILED, cause.reason, message[:1024]), decision)
    created = spec.session.template is not None and observed.session is None
    body = None
    if decision.create and observed.session:
        body = _pod(observed, spec, decision, settings)
    desired = status.build(observed, spec, health.running(observed, spec, decision), decision)
    old = [d.pod.attempt for d in observed.drivers if d.pod.attempt < decision.attempt]
    return JobPlan(
        apply_session=_session(observed, spec, rests=False),
        create_pod=body,
        credentials=decision.attempt if decision.create or (decision.driver and not decision.lost) else None,
        keep_key=decision.lost or decision.attempt == 0,
        delete_pods=_deletions(observed, old),
        stale_secrets=_stale_secrets(observed, decision.attempt),
        status=desired,
        events=events.tell(observed, desired, decision, session_created=created),
        poll=_poll(spec, decision),
        requeue_after=_requeue_after(observed, spec, decision, settings, old),
    )


def _pod(observed: ObservedJob, spec: RLJobSpec, decision: Decision, settings: JobSettings) -> Mapping[str, Any]:
    assert observed.session is not None
    assert observed.session.session.spec is not None  # it serves
    journal = observed.session.session.spec.storage.journal
    claim = journal.claim_name(observed.job.session_name)
    evicted = evicted_after(settings.node_lost_seconds, nodes_watched=observed.nodes_watched)
    place = children.Place(claim, journal.sub_path, settings.endpoint, settings.reader_image, evicted)
    resume: Point = status.resume_point(observed, spec)
    return children.pod(observed.job, spec, decision.attempt, resume, place, losses.shunned(observed))


def _session(observed: ObservedJob, spec: RLJobSpec, *, rests: bool) -> Mapping[str, Any] | None:
    """The job's own session as it is to be, where it is not so; one that is to rest is not made for that."""
    template, seen = spec.session.template, observed.session
    if template is None or (seen is None and rests):
        return None
    if seen and (not _own_session(observed, spec) or seen.suspended == (rests or template.spec.suspend)):
        return None
    return children.session(observed.job, template, rests=rests)


def _own_session(observed: ObservedJob, spec: RLJobSpec) -> str:
    seen = observed.session
    owned = spec.session.template and seen and seen.owner == observed.job.uid and not seen.session.deleting
    return seen.session.uid if owned and seen else ""


def _deletions(observed: ObservedJob, attempts: list[int]) -> tuple[PodDeletion, ...]:
    deletions: list[PodDeletion] = []
    for driver in observed.drivers:
        pod = driver.pod
        if pod.attempt not in attempts:
            continue
        if pod.deletion_requested is None:
            deletions.append(PodDeletion(pod.name, pod.uid))
        elif losses.proof_of_death(observed, pod) or observed.now >= _force_due(pod.deletion_requested):
            deletions.append(PodDeletion(pod.name, pod.uid, force=True))
    return tuple(deletions)


def _force_due(requested: datetime) -> datetime:
    return requested + timedelta(seconds=FORCE_DELETE_SECONDS)


def _force_wait(observed: ObservedJob, attempts: list[int]) -> float | None:
    requested = [d.pod.deletion_requested for d in observed.drivers if d.pod.attempt in attempts]
    waits = [(_force_due(time) - observed.now).total_seconds() for time in requested if time]
    return min((wait for wait in waits if wait > 0), default=None)


def _stale_secrets(observed: ObservedJob, attempt: int) -> tuple[int, ...]:
    """The few attempts before this one that have no pod."""
    live = {driver.pod.attempt for driver in observed.drivers}
    return tuple(number for number in range(max(1, attempt - 5), attempt) if number not in live)


def _poll(spec: RLJobSpec, decision: Decision) -> ProgressPoll | None:
    driver = decision.driver
    if driver is None or decision.lost or not driver.pod.ip or driver.pod.terminal:
        return None
    every = 3.0 if driver.pod.ready else 1.0
    return ProgressPoll(driver.pod.ip, driver.pod.uid, driver.pod.attempt, every, spec.goal)


def _requeue_after(
    observed: ObservedJob, spec: RLJobSpec, decision: Decision, settings: JobSettings, old: list[int]
) -> float | None:
    times = [
        decision.retry_at,
        outcome.active_until(observed.job.status, spec),
        losses.progress_due(observed, spec),
    ]
    pod = decision.driver.pod if decision.driver else None
    node = observed.nodes.get(pod.node) if pod else None
    if node and node.not_ready_since and decision.loss is None:
        times.append(node.not_ready_since + timedelta(seconds=settings.node_lost_seconds))
    if decision.exhausted == "infrastructure":
        times.append(recoveries.refills_at(spec.recovery.infrastructure, decision.budgets.infrastructure))
    if observed.refusal:
        times.append(observed.refusal.time + timedelta(seconds=observed.refusal.patience_seconds))
    if observed.progress.unreachable_since:
        patience = timedelta(seconds=health.UNREACHABLE_PATIENCE_SECONDS)
        times.append(observed.progress.unreachable_since + patience)
    coming = [(time - observed.now).total_seconds() for time in times if time and time > observed.now]
    forced = _force_wait(observed, old)
    return min([*coming, *([forced] if forced is not None else [])], default=None)
