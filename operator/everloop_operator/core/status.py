"""The status of a TrainingSession: how it is built, and when a change of it is worth a write."""

from __future__ import annotations

from typing import Any

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import (
    MAX_MODELS,
    BaseModelStatus,
    BudgetsStatus,
    CheckpointStatus,
    LatestCheckpoint,
    ModelStatus,
    PodStatus,
    StorageStatus,
    TrainingSessionStatus,
)

from . import claims, conditions, recoveries
from .health import Aspect, Health, recorded_counts
from .losses import Loss
from .observed import Observed, Pod
from .projections import parse_time
from .report import ModelReport, TrainerReport

SECONDS_BETWEEN_WRITES = 15.0
"""Between two writes of one status, unless something changed that somebody waits for."""


def build(
    observed: Observed,
    spec: TrainingSessionSpec,
    attempt: int,
    pod: Pod | None,
    budgets: BudgetsStatus,
    health: Health,
    endpoint: str,
) -> TrainingSessionStatus:
    """Everything but the recoveries. What the trainer last said stays while a new attempt starts."""
    before, report = observed.session.status, observed.trainer.report
    fields: dict[str, Any] = {
        "observed_generation": observed.session.generation,
        "phase": conditions.phase(health, pod),
        "attempt": attempt,
        "endpoint": endpoint,
        "pod": pod_status(observed, pod),
        "budgets": budgets,
        "storage": _storage(observed, spec, pod),
        "conditions": conditions.update(
            before.conditions,
            conditions.aspects(health, f"attempt {attempt} serves on {pod.node}" if pod else ""),
            generation=observed.session.generation,
            now=observed.now,
        ),
    }
    # Until the replay is done a report lacks what is still to be restored.
    if report and report.serving:
        fields |= _models(report)
    if report and report.base_model and report.base_model.manifest_sha256:
        fields["base_model"] = BaseModelStatus(
            revision=report.base_model.revision[:128], manifest_sha256=report.base_model.manifest_sha256
        )
    return before.model_copy(update=fields)


def with_recoveries(
    observed: Observed, desired: TrainingSessionStatus, pod: Pod | None, loss: Loss | None, health: Health
) -> tuple[TrainingSessionStatus, recoveries.Merged]:
    """Adds the entry of an attempt that takes over because of `loss`, and what the trainer reports."""
    before = observed.session.status
    entries, opened = list(before.recoveries), 0
    if loss and before.attempt > 0:
        entries.append(recoveries.opened(desired.attempt, loss, observed.now))
        opened = 1
    merged = recoveries.merge(
        entries,
        attempt=desired.attempt,
        node=pod.node if pod else "",
        report=observed.trainer.report if pod else None,
        serving=health.serving,
        now=observed.now,
    )
    count = before.recovery_count + opened + len(merged.added)
    return desired.model_copy(update={"recoveries": list(merged.entries), "recovery_count": count}), merged


def invalid(observed: Observed) -> TrainingSessionStatus:
    """The status of a session whose spec this version can't read; whatever runs goes on."""
    before = observed.session.status
    stalled = Aspect(True, names.REASON_INVALID_SPEC, observed.session.problem)
    unknown = Aspect(None, names.REASON_INVALID_SPEC)
    health = Health(
        False,
        stalled,
        unknown,
        unknown,
        unknown,
        unknown,
        unknown,
        unknown,
        recovering=False,
        moving=False,
        deadlines=(),
    )
    listed = conditions.update(
        before.conditions, conditions.aspects(health, ""), generation=observed.session.generation, now=observed.now
    )
    update = {
        "observed_generation": observed.session.generation,
        "phase": names.PHASE_FAILED,
        "conditions": listed,
    }
    return before.model_copy(update=update)


def pod_status(observed: Observed, pod: Pod | None) -> PodStatus | None:
    """The pod of the current attempt; None until it is seen."""
    if pod is None:
        return None
    before = observed.session.status.pod
    node = observed.nodes.get(pod.node)
    # Once recorded, the node's UID stays: another one under the same name is how its replacement shows.
    node_uid = node.uid if node else ""
    if before and before.uid == pod.uid and before.node == pod.node and before.node_uid:
        node_uid = before.node_uid
    return PodStatus(name=pod.name, uid=pod.uid, node=pod.node, node_uid=node_uid, ip=pod.ip)


def _storage(observed: Observed, spec: TrainingSessionSpec, pod: Pod | None) -> StorageStatus:
    before, report = observed.session.status.storage, observed.trainer.report
    error = before.error if before and recorded_counts(observed, pod) else ""
    last = report.last_snapshot_time if report else None
    copies = report.copies if report else None
    claim_uid = _claim_uid(observed, spec)
    # What one claim holds says nothing of another that has taken its name.
    lineage = before.lineage if before and before.claim_uid == claim_uid else ""
    return StorageStatus(
        fence_mode=claims.fence_mode(observed, spec) or (before.fence_mode if before else ""),
        claim_uid=claim_uid,
        lineage=(report.lineage if report else "") or lineage,
        last_snapshot_time=last or (before.last_snapshot_time if before else None),
        pending_copies=max(0, copies.pending) if copies else (before.pending_copies if before else 0),
        last_copy_time=(copies.last_time if copies else None) or (before.last_copy_time if before else None),
        error=report.storage.error[:1024] if report else error,
        replay_mismatches=max(0, report.replay_mismatches) if report else (before.replay_mismatches if before else 0),
    )


def _claim_uid(observed: Observed, spec: TrainingSessionSpec) -> str:
    name, before = spec.storage.journal.claim_name(observed.session.name), observed.session.status.storage
    if name not in observed.claims:
        return before.claim_uid if before else ""
    claim = observed.claims[name]
    return claim.uid if claim else ""


def _models(report: TrainerReport) -> dict[str, Any]:
    ordered = sorted(report.models, key=lambda model: (-model.step, model.id))
    newest = max(
        (model for model in report.models if model.latest_checkpoint and model.latest_checkpoint.time),
        key=_checkpoint_time,
        default=None,
    )
    latest = None
    if newest and newest.latest_checkpoint:
        point = newest.latest_checkpoint
        latest = LatestCheckpoint(
            model=newest.id,
            name=point.name,
            step=max(0, point.step),
            location=point.path[:1024],
            time=point.time,
            bytes=max(0, point.bytes),
        )
    return {
        "model_count": len(report.models),
        "models": [_model(model) for model in ordered[:MAX_MODELS]],
        "latest_checkpoint": latest,
    }


def _checkpoint_time(model: ModelReport) -> Any:
    return parse_time(model.latest_checkpoint.time if model.latest_checkpoint else None)


def _model(model: ModelReport) -> ModelStatus:
    point = model.latest_checkpoint
    checkpoint = CheckpointStatus(name=point.name, step=max(0, point.step), time=point.time) if point else None
    return ModelStatus(id=model.id, rank=max(0, model.rank), step=max(0, model.step), latest_checkpoint=checkpoint)


def dump(status: TrainingSessionStatus) -> dict[str, Any]:
    """As it is written: zeros and empty strings included, what is unknown left out."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def urgent(before: TrainingSessionStatus, after: TrainingSessionStatus) -> bool:
    """Whether something changed that a person, a program or the next decision waits for."""
    return _vital(before) != _vital(after)


def _vital(status: TrainingSessionStatus) -> tuple[Any, ...]:
    return (
        status.observed_generation,
        status.phase,
        status.attempt,
        status.pod,
        status.endpoint,
        status.leaving,
        status.rest,
        [(item.type, item.status, item.reason) for item in status.conditions],
        (status.storage.replay_mismatches, status.storage.claim_uid, status.storage.lineage)
        if status.storage
        else None,
        status.model_count,
        status.recoveries,
        (status.budgets.infrastructure.failures, status.budgets.application.failures) if status.budgets else (),
        status.failure,
    )
