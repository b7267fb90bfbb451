"""Snapshots in the background, often enough that the replay after a loss stays within its budget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import structlog

from everloop_trainer.session.context import Context
from everloop_trainer.session.errors import EngineRefused, Fenced, StorageFailed
from everloop_trainer.session.history import Model
from everloop_trainer.session.identifiers import request_id
from everloop_trainer.session.ports import ALPHA, Engine, Manifest, Place, Position, Written
from everloop_trainer.session.recovery import retained

COST = 0.05
"""Share of the engine's time that writing snapshots may take while the replay is below its budget."""
SHORTEST = 2.0
"""Seconds of replay that are not worth a snapshot."""
log = structlog.get_logger(__name__)


def interval(budget: float, writing: float) -> float:
    """Seconds of engine time after which a model is snapshotted. Pure.

    As often as `COST` allows, so that the replay is short where snapshots are cheap, but never beyond the budget.

    Args:
        budget: greatest replay in seconds (spec.snapshots.replayBudgetSeconds).
        writing: seconds that this model's last snapshot took from the copy to its manifest; 0 if there was none yet.
    """
    return min(budget, max(SHORTEST, writing / COST))


class Snapshotting:
    """Counts each model's engine seconds since its last durable snapshot, and takes the next one when it is due."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seconds: dict[str, float] = {}
        self._writing: dict[str, float] = {}
        self._taken: dict[str, tuple[int, int]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.last_time = ""
        self.newest: dict[str, str] = {}
        """By model: key of the newest snapshot that this incarnation has made."""

    def worked(self, model_id: str, seconds: float) -> None:
        """The engine spent this long on an operation that changes the model."""
        self._seconds[model_id] = self._seconds.get(model_id, 0.0) + seconds

    def restored(self, model_id: str, seconds: float) -> None:
        """A new engine holds the model; bringing it there took this long."""
        self._seconds[model_id] = seconds

    async def take_if_due(self, engine: Engine, generation: int, model_id: str) -> None:
        """To be called at a step boundary. Raises ConnectionError or EOFError if the engine is lost."""
        due = interval(self._context.config.replay_budget, self._writing.get(model_id, 0.0))
        if self._seconds.get(model_id, 0.0) > due and model_id not in self._tasks:
            await self._take(engine, generation, self._context.history.models[model_id])

    async def take(self, engine: Engine, generation: int, model_id: str) -> None:
        """Snapshot one model and wait until it is durable. Raises ConnectionError or EOFError if the engine is lost."""
        await self._settle()
        await self._take(engine, generation, self._context.history.models[model_id])
        await self._settle()

    async def take_all(self, engine: Engine, generation: int) -> None:
        """Snapshot every model that changed since its last one, and wait until all are durable."""
        await self._settle()
        for model in self._context.history.models.values():
            if model.info.model_id not in self._context.broken:
                await self._take(engine, generation, model)
        await self._settle()

    async def begin_all(self, engine: Engine, generation: int) -> None:
        """Begin a snapshot of every model that changed since its last one. Raises ConnectionError or EOFError."""
        for model in self._context.history.models.values():
            if model.info.model_id not in self._context.broken and model.info.model_id not in self._tasks:
                await self._take(engine, generation, model)

    @property
    def under_way(self) -> int:
        """How many snapshots are being written."""
        return len(self._tasks)

    async def abandon(self) -> None:
        """Stop what is still under way: without its manifest it does not count."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self) -> None:
        await asyncio.gather(*self._tasks.values())

    async def _take(self, engine: Engine, generation: int, model: Model) -> None:
        model_id = model.info.model_id
        stream = self._context.history.streams[model_id]
        last = stream.entries[stream.done - 1]
        assert last.ended is not None, "what lies below `done` has ended"
        if last.ended.result.loaded is not None or self._taken.get(model_id) == (generation, last.seq):
            return  # a load has stored this state itself
        self._taken[model_id] = (generation, last.seq)
        place = self._context.states.place("snapshots", model_id, last.seq, generation)
        try:
            writing = await engine.snapshot(model_id, last.seq, place.path)
        except EngineRefused as refused:
            self._complain(model_id, refused.error)
            return
        covered = self._seconds.get(model_id, 0.0)
        finishing = self._finish(model, place, last.seq, model.step, last.ended.position, writing, covered)
        task = asyncio.create_task(self._watch(model_id, finishing), name=f"snapshot of {model_id}")
        self._tasks[model_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(model_id, None))

    async def _watch(self, model_id: str, finishing: Awaitable[None]) -> None:
        with self._context.underway.of(f"the snapshot of {model_id}"):
            await finishing

    async def _finish(
        self,
        model: Model,
        place: Place,
        seq: int,
        step: int,
        stands_on: Position,
        writing: Awaitable[Written],
        covered: float,
    ) -> None:
        config, model_id = self._context.config, model.info.model_id
        since = config.monotonic()
        try:
            written = await writing
            manifest = Manifest(
                kind="snapshots",
                key=place.key,
                model=model_id,
                operation=request_id(model_id, seq),
                seq=seq,
                step=step,
                stands_on=stands_on,
                base_model=config.base_model,
                lora=model.info.lora,
                alpha=ALPHA,
                sha256=written.sha256,
                size=written.size,
                time=config.now(),
            )
            await self._context.states.commit(manifest)
            self._writing[model_id] = config.monotonic() - since
            self._seconds[model_id] = max(0.0, self._seconds.get(model_id, 0.0) - covered)
            self.last_time = manifest.time
            self.newest[model_id] = place.key
            self._context.storage_errors.pop(_what(model_id), None)
            log.info("snapshot stored", model=model_id, seq=seq, step=step, bytes=written.size)
            stream = self._context.history.streams[model_id]
            await self._context.states.retain(model_id, lambda stored: retained(stream, model.root, stored))
        except EngineRefused as refused:
            self._complain(model_id, refused.error)
        except (ConnectionError, EOFError):
            log.warning("snapshot lost with its engine", model=model_id, seq=seq)
        except (Fenced, StorageFailed) as failure:
            self._context.end(failure)

    def _complain(self, model_id: str, error: str) -> None:
        """A snapshot that failed costs replay time only; the next step boundary tries again."""
        log.error("snapshot failed", model=model_id, error=error)
        self._context.storage_errors[_what(model_id)] = error


def _what(model_id: str) -> str:
    return f"snapshot of {model_id}"
