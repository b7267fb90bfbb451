"""The status of an RLJob: how it is built, and when a change of it is worth a write."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from everloop_operator.api import names
from everloop_operator.api.rl_job import RLJobSpec
from everloop_operator.api.rl_job_status import (
    MAX_LOG_TAIL,
    BestCheckpoint,
    Evaluation,
    Failure,
    JobCheckpoint,
    JobRecovery,
    JobSessionStatus,
    LossStatus,
    Progress,
    RLJobStatus,
)
from everloop_operator.api.training_session_status import MAX_RECOVERIES, PodStatus
from everloop_operator.core import conditions
from everloop_operator.core.health import Aspect
from everloop_operator.core.observed import Pod
from everloop_operator.core.projections import format_time

from . import children, losses
from .decision import Decision
from .health import JobHealth
from .losses import Loss
from .observed import ObservedJob
from .report import Point
from .scrub import scrub


def build(observed: ObservedJob, spec: RLJobSpec, health: JobHealth, decision: Decision | None) -> RLJobStatus:
    """The status to be; without a decision that of a job that rests or ends."""
    before, now = observed.job.status, observed.now
    seen = observed.session
    driver = decision.driver if decision else None
    attempt = decision.attempt if decision else observed.attempt
    fields: dict[str, Any] = {
        "observed_generation": observed.job.generation,
        "phase": health.phase,
        "attempt": attempt,
        "pod": _pod(observed, driver.pod) if driver else None,
        "conditions": conditions.update(
            before.conditions, health.aspects(), generation=observed.job.generation, now=now
        ),
        **_told(observed, spec),
        **_active(before, now, active=health.phase in _ACTIVE and attempt > 0),
    }
    fields["session"] = JobSessionStatus(
        name=observed.job.session_name,
        uid=seen.session.uid if seen else "",
        model=_model(fields.get("latest_checkpoint", before.latest_checkpoint)),
    )
    waiting = decision.loss if decision and decision.lost else None
    fields["loss"] = _loss(waiting) if decision else _loss(losses.RESUMED if attempt > 0 else None)
    if decision:
        fields["budgets"] = decision.budgets
        fields |= _recoveries(observed, decision, running=health.phase == names.PHASE_RUNNING)
        if decision.loss and decision.loss.budget == "application":
            fields["failure"] = failure(observed, decision.loss)
    return before.model_copy(update=fields)


def _model(checkpoint: JobCheckpoint | None) -> str:
    """The model of a checkpoint that the job has saved, which one that it started from is not."""
    if checkpoint is None or checkpoint.iteration == 0:
        return ""
    return checkpoint.location.removeprefix("tinker://").partition("/")[0]


def _loss(loss: Loss | None) -> LossStatus | None:
    if loss is None:
        return None
    return LossStatus(reason=loss.reason, message=loss.message[:1024], budget=loss.budget, node=loss.node)


CRASHES = (134, 139)
"""Exit codes of SIGABRT and SIGSEGV, by which an interpreter may end that was done."""
_ACTIVE = (
    names.PHASE_PENDING,
    names.PHASE_QUEUED,
    names.PHASE_RUNNING,
    names.PHASE_RECOVERING,
    names.PHASE_FAILED,
)


def ended(desired: RLJobStatus, now: datetime) -> RLJobStatus:
    """The status of a job that ends now."""
    update: dict[str, Any] = {
        "finish_time": format_time(now),
        "pod": None,
        "loss": None,
        **_active(desired, now, active=False),
    }
    if desired.phase == names.PHASE_COMPLETED:
        update["failure"] = None
    return desired.model_copy(update=update)


def kept(observed: ObservedJob) -> RLJobStatus:
    """The status of a job that has ended before: only the generation that it is about may change."""
    before, generation = observed.job.status, observed.job.generation
    listed = [item.model_copy(update={"observed_generation": generation}) for item in before.conditions]
    return before.model_copy(update={"observed_generation": generation, "conditions": listed})


def invalid(observed: ObservedJob) -> RLJobStatus:
    """The status of a job whose spec this version can't read; whatever runs goes on."""
    before, unknown = observed.job.status, Aspect(None, names.REASON_INVALID_SPEC)
    stalled = Aspect(True, names.REASON_INVALID_SPEC, observed.job.problem)
    ready = Aspect(False, names.REASON_INVALID_SPEC, observed.job.problem)
    health = JobHealth(names.PHASE_FAILED, ready, stalled, unknown, unknown)
    listed = conditions.update(
        before.conditions, health.aspects(), generation=observed.job.generation, now=observed.now
    )
    update = {"observed_generation": observed.job.generation, "phase": health.phase, "conditions": listed}
    return before.model_copy(update=update)


def resume_point(observed: ObservedJob, spec: RLJobSpec) -> Point:
    """What the next driver goes on from, as far as is known here; its progress reader checks it with the storage."""
    if observed.report:
        return observed.report.resume
    known = observed.job.status.latest_checkpoint
    return Point(iteration=known.iteration, checkpoint=known.location) if known else children.start_point(spec)


def failure(observed: ObservedJob, loss: Loss) -> Failure:
    """What is to be said of a driver that ended with an error."""
    driver = observed.current
    output = driver.pod.container.exit_message if driver else ""
    before = observed.job.status.failure
    if driver is None and before and before.attempt == observed.attempt:
        return before
    reason = names.REASON_DRIVER_OUT_OF_MEMORY if loss.out_of_memory else names.REASON_DRIVER_FAILED
    return Failure(
        reason=loss.reason if loss.reason == names.RECOVERY_NO_PROGRESS else reason,
        attempt=observed.attempt,
        exit_code=loss.exit_code,
        remedy=_remedy(loss),
        log_tail=scrub(output, MAX_LOG_TAIL),
    )


def _remedy(loss: Loss) -> str:
    if loss.reason == names.RECOVERY_NO_PROGRESS:
        return "find out what the program waits for, or raise spec.deadlines.progressSeconds"
    if loss.out_of_memory:
        return "give the driver more memory: spec.runner.resources.limits.memory"
    if loss.exit_code in (126, 127):
        return "the command can't be run: check spec.runner.command and spec.runner.image"
    if loss.exit_code in CRASHES:
        return (
            "the program crashed (SIGABRT, SIGSEGV); if its work was done by then, let it report `done` and end with "
            "os._exit(0): docs/rljob.md"
        )
    if loss.exit_code in (137, 143):
        return "the driver was killed by a signal from outside; if it happens again, look at its node"
    return "the program ended with an error of its own: see logTail"


def _pod(observed: ObservedJob, pod: Pod) -> PodStatus:
    before, node = observed.job.status.pod, observed.nodes.get(pod.node)
    # Once recorded, the node's UID stays: another one under the same name is how its replacement shows.
    node_uid = node.uid if node else ""
    if before and before.uid == pod.uid and before.node == pod.node and before.node_uid:
        node_uid = before.node_uid
    return PodStatus(name=pod.name, uid=pod.uid, node=pod.node, node_uid=node_uid, ip=pod.ip)


def _told(observed: ObservedJob, spec: RLJobSpec) -> dict[str, Any]:
    """What the progress reader says; without a report what was known stays."""
    report, before = observed.report, observed.job.status
    most = spec.limits.max_iterations
    if report is None:
        known = before.progress or Progress()
        return {"progress": known.model_copy(update={"max_iterations": most, "eta_seconds": None})}
    eta = None
    if most is not None and report.seconds_per_iteration is not None:
        eta = math.ceil(max(0, most - report.iteration) * float(report.seconds_per_iteration))
    evaluation = None
    if report.evaluation:
        evaluation = Evaluation.model_validate(report.evaluation.model_dump())
    best = None
    if report.best:
        best = BestCheckpoint(iteration=report.best.iteration, location=report.best.checkpoint, value=report.best.value)
    return {
        "progress": Progress(
            iteration=report.iteration,
            iterations=report.iterations,
            max_iterations=most,
            reward=report.reward,
            eta_seconds=eta,
        ),
        "evaluation": evaluation,
        "latest_checkpoint": JobCheckpoint(iteration=report.resume.iteration, location=report.resume.checkpoint),
        "best_checkpoint": best,
    }


def _active(before: RLJobStatus, now: datetime, *, active: bool) -> dict[str, Any]:
    since = before.active_since
    if active:
        return {"active_since": since or format_time(now)}
    if since is None:
        return {}
    seconds = max(0, int((now - datetime.fromisoformat(since)).total_seconds()))
    return {"active_since": None, "active_seconds": before.active_seconds + seconds}


def _recoveries(observed: ObservedJob, decision: Decision, *, running: bool) -> dict[str, Any]:
    before, entries, count = observed.job.status, list(observed.job.status.recoveries), 0
    if decision.loss and decision.attempt > before.attempt > 0:
        count = 1
        resumed = decision.driver.resume.iteration if decision.driver else _next_iteration(observed)
        entries.append(
            JobRecovery(
                id=f"a{decision.attempt}",
                attempt=decision.attempt,
                reason=decision.loss.reason,
                node=decision.loss.node,
                iteration=resumed,
                time=format_time(observed.now),
            )
        )
    elif running and entries and entries[-1].seconds is None:
        took = max(0.0, (observed.now - datetime.fromisoformat(entries[-1].time)).total_seconds())
        entries[-1] = entries[-1].model_copy(update={"seconds": f"{took:.1f}"})
    return {"recoveries": entries[-MAX_RECOVERIES:], "recovery_count": before.recovery_count + count}


def _next_iteration(observed: ObservedJob) -> int:
    assert observed.job.spec is not None
    return resume_point(observed, observed.job.spec).iteration


def dump(status: RLJobStatus) -> dict[str, Any]:
    """As it is written: zeros and empty strings included, what is unknown left out."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def urgent(before: RLJobStatus, after: RLJobStatus) -> bool:
    """Whether something changed that a person, a program or the next decision waits for."""
    return _vital(before) != _vital(after)


def _vital(status: RLJobStatus) -> tuple[Any, ...]:
    return (
        status.observed_generation,
        status.phase,
        status.attempt,
        status.session,
        status.pod,
        [(item.type, item.status, item.reason) for item in status.conditions],
        status.recoveries,
        status.active_since,
        status.finish_time,
        (status.budgets.infrastructure.failures, status.budgets.application.failures) if status.budgets else None,
        status.loss,
        status.failure.attempt if status.failure else None,
    )
