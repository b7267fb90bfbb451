"""What `GET /status` tells of a session, gathered from its parts."""

from __future__ import annotations

from everloop_trainer.session.context import Context
from everloop_trainer.session.history import Model
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.runner import Runner
from everloop_trainer.session.status import CheckpointStatus, ModelStatus, SessionStatus, UnderwayStatus


def trouble(context: Context) -> str:
    """Why nothing goes on just now for the storage's sake; empty if all is well."""
    return context.journal.trouble or context.full


def report(context: Context, runner: Runner, heard: float) -> SessionStatus:
    """The state as plain values; `heard` is when the last call of any client came, on the monotonic clock."""
    failures = [f"{what}: {error}" for what, error in context.storage_errors.items()]
    stopped = [f"{stream} is stopped: {why}" for stream, why in context.broken.items()]
    return SessionStatus(
        state=runner.state,
        incarnation=context.config.incarnation,
        lineage=context.config.lineage,
        base_model=context.config.base_model,
        engine_pid=None if runner.engine is None else runner.engine.pid,
        engine_restarts=max(0, runner.generation - 1),
        models=tuple(_model(context, model) for model in context.history.models.values()),
        last_snapshot_time=runner.snapshots.last_time,
        storage_error="; ".join(filter(None, [trouble(context), context.underway.trouble, *failures, *stopped])),
        replay_mismatches=context.replay_mismatches,
        waiting_operations=context.history.unfinished(),
        recoveries=tuple(runner.recoveries),
        snapshot_request=runner.requested,
        idle_seconds=_idle_seconds(context, runner, heard),
        underway=_underway(context, runner),
        checkpoints=context.checkpoints,
        work=context.work,
    )


def _idle_seconds(context: Context, runner: Runner, heard: float) -> float:
    """Since when nobody has called and nothing has run; what waits for a number that never came does not run."""
    if (
        runner.running is not None
        or runner.sampling
        or any(
            stream.ready() is not None
            for name, stream in context.history.streams.items()
            if stream.pending and name not in context.broken
        )
    ):
        return 0.0
    return max(0.0, context.config.monotonic() - max(heard, runner.worked))


def _underway(context: Context, runner: Runner) -> UnderwayStatus | None:
    """The operation that runs longest, or else one that was tried and has no result: engines died in it."""
    incarnation = context.config.incarnation.number
    begun = dict(runner.sampling)
    if runner.running is not None:
        begun[runner.running.request_id] = runner.started
    if begun:
        request = min(begun, key=begun.__getitem__)
        entry = context.history.entry(request)
        assert entry is not None, "what runs has no result yet"
        return UnderwayStatus(request, context.config.monotonic() - begun[request], entry.tries.weight)
    for stream in context.history.streams.values():
        for entry in stream.runnable() if stream.pending else ():
            if weight := entry.tries.weight_seen_by(incarnation):
                return UnderwayStatus(entry.request_id, None, weight)
    return None


def _model(context: Context, model: Model) -> ModelStatus:
    stream = context.history.streams[model.info.model_id]
    latest = model.latest_checkpoint
    shown = None
    if latest is not None and latest.name is not None and latest.path is not None:
        shown = CheckpointStatus(latest.name, latest.step, latest.stored.time, latest.path, latest.stored.size)
    return ModelStatus(
        id=storage_id(model.info.model_id),
        model_id=model.info.model_id,
        rank=model.info.lora.rank,
        step=model.step,
        seq=stream.done - 1,
        pending=len(stream.pending),
        latest_checkpoint=shown,
    )
