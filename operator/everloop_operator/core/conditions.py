"""Conditions and phase, from the judgement of `health`. All conditions are there from the first pass."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from everloop_operator.api import names
from everloop_operator.api.training_session_status import Condition

from .health import Aspect, Health
from .observed import Pod
from .projections import format_time

MAX_MESSAGE = 1024


def phase(health: Health, pod: Pod | None) -> str:
    """The table of phases: each is one combination of Ready, Reconciling, Stalled and Serving."""
    if health.stalled:
        return names.PHASE_FAILED
    if health.resting:
        return health.resting.phase if health.resting.settled else names.PHASE_STOPPING
    if health.serving:
        return names.PHASE_RUNNING
    if health.moving:
        return names.PHASE_MOVING
    if health.recovering:
        return names.PHASE_RECOVERING
    if pod and pod.queued:
        return names.PHASE_QUEUED
    return names.PHASE_STARTING if pod and pod.node else names.PHASE_PENDING


def aspects(health: Health, serving_message: str) -> dict[str, Aspect]:
    """The judgement as conditions, without their times."""
    if health.resting and health.resting.settled and not health.stalled:
        ready = Aspect(True, health.resting.phase, health.resting.why)
        reconciling = Aspect(False, names.REASON_AS_EXPECTED)
        stalled = Aspect(False, names.REASON_AS_EXPECTED)
        serving = Aspect(False, health.resting.phase, health.resting.why)
    elif health.stalled:
        ready = Aspect(False, health.stalled.reason, health.stalled.message)
        reconciling = Aspect(False, health.stalled.reason, "nothing is being done; see condition Stalled")
        stalled = health.stalled
        serving = Aspect(False, health.stalled.reason, health.stalled.message)
    elif health.serving:
        ready = serving = Aspect(True, names.REASON_SERVING, serving_message)
        reconciling = Aspect(False, names.REASON_AS_EXPECTED)
        stalled = Aspect(False, names.REASON_AS_EXPECTED)
    else:
        ready = serving = health.waiting
        reconciling = Aspect(True, health.waiting.reason, health.waiting.message)
        stalled = Aspect(False, names.REASON_AS_EXPECTED)
    return {
        names.CONDITION_READY: ready,
        names.CONDITION_RECONCILING: reconciling,
        names.CONDITION_STALLED: stalled,
        names.CONDITION_SERVING: serving,
        names.CONDITION_PODS_READY: health.pods,
        names.CONDITION_VOLUMES_READY: health.volumes,
        names.CONDITION_BASE_MODEL_READY: health.base_model,
        names.CONDITION_NODES_HEALTHY: health.nodes,
        names.CONDITION_COPIES_CURRENT: health.copies,
    }


def update(
    previous: Sequence[Condition], wanted: dict[str, Aspect], *, generation: int, now: datetime
) -> list[Condition]:
    """`lastTransitionTime` moves only with the status of the condition."""
    before = {condition.type: condition for condition in previous}
    result = []
    for kind, aspect in wanted.items():
        status = {True: "True", False: "False", None: "Unknown"}[aspect.status]
        old = before.get(kind)
        message = aspect.message[:MAX_MESSAGE]
        said = (status, aspect.reason, message, generation)
        if old and (old.status, old.reason, old.message, old.observed_generation) == said:
            result.append(old)  # nearly always; to make it anew would cost as much as deciding
            continue
        kept = old.last_transition_time if old and old.status == status else format_time(now)
        result.append(
            Condition.model_validate(
                {
                    "type": kind,
                    "status": status,
                    "reason": aspect.reason,
                    "message": message,
                    "last_transition_time": kept,
                    "observed_generation": generation,
                }
            )
        )
    return result
