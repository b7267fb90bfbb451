"""Bringing the models back into a new engine: snapshot, then the operations after it again."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from everloop_trainer.session.context import Context
from everloop_trainer.session.errors import EngineRefused, JournalDamaged
from everloop_trainer.session.history import Model
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.operations import ForwardBackward, OptimStep
from everloop_trainer.session.ports import Engine
from everloop_trainer.session.recovery import Plan, plans
from everloop_trainer.session.streams import Entry

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """A model that is in the engine again: from which number, by how many operations, in how many seconds."""

    model_id: str
    resumed_from: int
    replayed: int
    seconds: float


class Restoring:
    """Restores models. Replay changes the engine's state only: nothing is journaled, stored or delivered."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def restore(self, engine: Engine, model: Model) -> Restored | None:
        """Bring one model to its last finished operation, or mark it broken and return None.

        Raises:
            ConnectionError, EOFError: the engine was lost.
            StorageFailed: the storage failed.
        """
        context = self._context
        model_id = model.info.model_id
        started = context.config.monotonic()
        stream = context.history.streams[model_id]
        reason = "no way to restore it was left"
        for plan in plans(stream, await context.states.snapshots(model_id)):
            try:
                await self._load(engine, model, plan)
                loaded = context.config.monotonic()
                for entry in plan.replay:
                    await self._again(engine, entry)
            except (EngineRefused, JournalDamaged) as error:
                reason = str(error)
                log.error("restoring a model failed", model=model_id, resumed_from=plan.resumed_from, error=reason)
                continue
            context.broken.pop(model_id, None)
            ended = context.config.monotonic()
            seconds = ended - started
            context.work.replay_seconds += seconds
            log.info(
                "model restored",
                model=model_id,
                id=storage_id(model_id),
                resumed_from=plan.resumed_from,
                replayed=len(plan.replay),
                seconds=round(seconds, 3),
                replay_seconds=round(ended - loaded, 3),
            )
            return Restored(model_id, plan.resumed_from, len(plan.replay), seconds)
        context.stop(model_id, f"could not be restored: {reason}")
        return None

    async def _load(self, engine: Engine, model: Model, plan: Plan) -> None:
        base, info = plan.base, model.info
        if base is None:
            await engine.init(info.model_id, info.lora)
            return
        path = self._context.states.path("snapshots", info.model_id, base.key)
        with self._context.underway.of(f"the reading of the snapshot of {info.model_id}"):
            await engine.restore(info.model_id, path, info.lora, base.sha256, "all")

    async def _again(self, engine: Engine, entry: Entry) -> None:
        """Run a finished operation again, with the same effect on the engine's state."""
        assert entry.ended is not None, "only finished operations are replayed"
        match entry.args:
            case ForwardBackward(forward_only=forward_only):
                request = await self._context.journal.read(entry.accepted)
                answer = await engine.forward_backward(entry.stream, entry.seq, forward_only, request)
                if answer.body != await self._context.journal.read(entry.ended.position):
                    self._context.replay_mismatches += 1
                    log.error("replay differs from the recorded result", operation=entry.request_id)
            case OptimStep() as step:
                if entry.ended.result.gradients_dropped:
                    await engine.drop_gradients(entry.stream, entry.seq)
                else:
                    await engine.optim_step(entry.stream, entry.seq, step)
            case _:
                raise AssertionError(f"{entry.request_id} changes no state")
