"""How a job does, as conditions say it: its session, its driver, and both together."""

from __future__ import annotations

from dataclasses import dataclass

from everloop_operator.api import names
from everloop_operator.api.rl_job import RLJobSpec
from everloop_operator.core.health import Aspect
from everloop_operator.core.observed import within

from .decision import Decision
from .observed import ObservedJob
from .outcome import Outcome

SHARED = "SharedPosix"
UNREACHABLE_PATIENCE_SECONDS = 15.0
"""How long a progress reader may be silent before the status says so."""
_IMAGE_TROUBLE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_BLOCKED = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError")


@dataclass(frozen=True, slots=True)
class JobHealth:
    """The judgement of one pass."""

    phase: str
    ready: Aspect
    stalled: Aspect | None
    session: Aspect
    pods: Aspect

    def aspects(self) -> dict[str, Aspect]:
        """The judgement as conditions, without their times."""
        working = self.phase in (names.PHASE_PENDING, names.PHASE_QUEUED, names.PHASE_RECOVERING)
        as_expected = Aspect(False, names.REASON_AS_EXPECTED)
        completed = self.phase == names.PHASE_COMPLETED
        return {
            names.CONDITION_READY: self.ready,
            names.CONDITION_RECONCILING: Aspect(True, self.ready.reason, self.ready.message)
            if working
            else as_expected,
            names.CONDITION_STALLED: self.stalled or as_expected,
            names.CONDITION_COMPLETE: Aspect(completed, self.ready.reason, self.ready.message if completed else ""),
            names.CONDITION_SESSION_READY: self.session,
            names.CONDITION_PODS_READY: self.pods,
        }


def session(observed: ObservedJob, spec: RLJobSpec) -> Aspect:
    """Whether there is a session that a driver can train on."""
    name, seen = observed.job.session_name, observed.session
    title = f'TrainingSession "{name}"'
    if seen is None:
        if spec.session.template:
            return Aspect(False, names.REASON_SESSION_NOT_FOUND, f"{title} is being created")
        where = f'in namespace "{observed.job.namespace}"'
        return Aspect(False, names.REASON_SESSION_NOT_FOUND, f"{title} (spec.session.ref) does not exist {where}")
    if spec.session.template and seen.owner != observed.job.uid:
        message = f"{title} exists already and is not this job's; its name is that of the job"
        return Aspect(False, names.REASON_SESSION_NAME_TAKEN, message)
    storage = seen.session.status.storage
    if storage and storage.fence_mode not in ("", SHARED):
        message = f"the journal's claim of {title} is not ReadWriteMany: a driver can't share it"
        return Aspect(False, names.REASON_CLAIM_NOT_SHARED, message)
    if seen.wakes:
        return Aspect(True, names.REASON_IDLE, f"{title} is idle; the driver's first call wakes it")
    serving = _condition(observed, names.CONDITION_SERVING)
    if serving is None or serving[0] != "True" or not storage or not storage.fence_mode:
        why = serving[1] if serving else "it is new"
        return Aspect(False, names.REASON_SESSION_NOT_SERVING, f"{title} does not serve: {why}")
    return Aspect(True, names.REASON_SERVING, f"{title} serves")


def impossible(session: Aspect) -> bool:
    """Whether a session can't be used until somebody changes something."""
    return session.reason in (names.REASON_SESSION_NAME_TAKEN, names.REASON_CLAIM_NOT_SHARED)


def _condition(observed: ObservedJob, kind: str) -> tuple[str, str] | None:
    assert observed.session is not None
    found = (c for c in observed.session.session.status.conditions if c.type == kind)
    return next(((c.status, c.message or c.reason) for c in found), None)


def running(observed: ObservedJob, spec: RLJobSpec, decision: Decision) -> JobHealth:
    """The judgement of a job that is neither suspended nor finished."""
    seen, pods = session(observed, spec), _pods(observed, decision)
    stalled = _stalled(observed, decision, seen)
    begun = observed.attempt > 1 or decision.loss is not None or observed.job.status.phase in _BEGUN
    if stalled:
        return JobHealth(names.PHASE_FAILED, Aspect(False, stalled.reason, stalled.message), stalled, seen, pods)
    if pods.status is True:
        message = pods.message
        silent = observed.progress.unreachable_since
        if silent and not within(observed.now - silent, UNREACHABLE_PATIENCE_SECONDS):
            message += f"; its progress can't be read ({observed.progress.problem})"
        elif observed.report and observed.report.problem:
            message += f"; of its progress: {observed.report.problem}"
        return JobHealth(names.PHASE_RUNNING, Aspect(True, names.REASON_RUNNING, message), None, seen, pods)
    phase = names.PHASE_RECOVERING if begun else _before(observed, decision)
    reason = names.REASON_RECOVERING if begun else names.REASON_WAITING
    # Without a driver the session is what is waited for; with one, calls are held until the session is back.
    blocker = pods if decision.driver and not decision.lost else (seen if seen.status is not True else pods)
    told = [decision.loss.message, blocker.message] if decision.loss else [blocker.message]
    return JobHealth(phase, Aspect(False, reason, "; ".join(dict.fromkeys(told))), None, seen, pods)


def _before(observed: ObservedJob, decision: Decision) -> str:
    """The phase of a job of which no driver has run."""
    if decision.driver:
        queued = decision.driver.pod.queued
    else:
        queued = observed.session is not None and observed.session.session.status.phase == names.PHASE_QUEUED
    return names.PHASE_QUEUED if queued else names.PHASE_PENDING


_BEGUN = (names.PHASE_RUNNING, names.PHASE_RECOVERING)


def resting(observed: ObservedJob, spec: RLJobSpec) -> JobHealth:
    """The judgement of a suspended job."""
    ready = Aspect(True, names.REASON_SUSPENDED, "the job is suspended (spec.suspend)")
    pods = Aspect(False, names.REASON_SUSPENDED, "no driver while the job is suspended")
    return JobHealth(names.PHASE_SUSPENDED, ready, None, session(observed, spec), pods)


def finished(observed: ObservedJob, spec: RLJobSpec, outcome: Outcome) -> JobHealth:
    """The judgement of a job that ends now."""
    completed = outcome.phase == names.PHASE_COMPLETED
    ready = Aspect(completed, outcome.reason, outcome.message)
    stalled = None if completed else Aspect(True, outcome.reason, outcome.message)
    pods = Aspect(False, outcome.reason, "the job has finished")
    return JobHealth(outcome.phase, ready, stalled, session(observed, spec), pods)


def _stalled(observed: ObservedJob, decision: Decision, session: Aspect) -> Aspect | None:
    if decision.exhausted and decision.loss:
        field = f"spec.recovery.{decision.exhausted}"
        message = f"no attempt is left in {field}; the last cause: {decision.loss.message} ({decision.loss.reason})"
        return Aspect(True, names.REASON_BUDGET_EXHAUSTED, message)
    if impossible(session) and (decision.driver is None or decision.lost):
        return Aspect(True, session.reason, session.message)
    refusal = observed.refusal
    if refusal and refusal.settled and not decision.create and (decision.driver is None or decision.lost):
        return Aspect(True, names.REASON_POD_INVALID, f"the driver's pod was refused: {refusal.message}")
    return None


def _pods(observed: ObservedJob, decision: Decision) -> Aspect:
    driver = decision.driver
    if driver is None:
        refusal = None if decision.create else observed.refusal
        if refusal:
            reason = names.REASON_POD_INVALID if refusal.settled else names.REASON_POD_CREATING
            return Aspect(False, reason, refusal.message)
        message = "the driver is being created" if decision.create else "there is no driver"
        return Aspect(False, names.REASON_POD_CREATING, message)
    pod = driver.pod
    if decision.lost and decision.loss:
        return Aspect(False, names.REASON_POD_NOT_READY, decision.loss.message)
    if pod.ready:
        return Aspect(True, names.REASON_RUNNING, f"driver {pod.name} runs on {pod.node}")
    if pod.unschedulable_since:
        return Aspect(False, names.REASON_UNSCHEDULABLE, f"pod {pod.name}: {pod.unschedulable_message}")
    if pod.gates:
        return Aspect(False, names.REASON_SCHEDULING_GATED, f"pod {pod.name} is held back by {', '.join(pod.gates)}")
    for container in (driver.reader, pod.container):
        waiting = ": ".join(filter(None, (container.waiting_reason, container.waiting_message)))
        if container.waiting_reason in _IMAGE_TROUBLE:
            return Aspect(False, names.REASON_IMAGE_UNAVAILABLE, f"pod {pod.name}: {waiting}")
        if container.waiting_reason in _BLOCKED:
            return Aspect(False, names.REASON_DRIVER_BLOCKED, f"pod {pod.name}: {waiting}")
    return Aspect(False, names.REASON_POD_NOT_READY, f"pod {pod.name} is starting")
