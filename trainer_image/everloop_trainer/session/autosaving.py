"""Automatic checkpoints: for the case that a user's own process dies and has to go on from somewhere.

Unlike a snapshot it is named, listed and loadable like what a user saved. Each is written at a step boundary, and
counts from the moment its record is in the journal; whatever dies before that leaves a file that is swept later.
"""

from __future__ import annotations

import asyncio
import math

import structlog

from everloop_trainer.session.context import Context
from everloop_trainer.session.errors import EngineRefused
from everloop_trainer.session.history import Model
from everloop_trainer.session.identifiers import request_id, tinker_path
from everloop_trainer.session.keeping import in_use
from everloop_trainer.session.operations import OptimStep
from everloop_trainer.session.ports import ALPHA, Engine, Manifest
from everloop_trainer.session.records import Autosaved, Pruned, Stored
from everloop_trainer.session.streams import Stream

log = structlog.get_logger(__name__)


class Autosaving:
    """Takes each model's automatic checkpoints, and deletes those beyond the newest few."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # How long ago a model of an earlier incarnation was saved is not known: its next boundary is due.
        self._last = dict.fromkeys(context.history.models, -math.inf)

    async def take_if_due(self, engine: Engine, generation: int, model_id: str) -> None:
        """To be called at a step boundary. Raises ConnectionError or EOFError if the engine is lost."""
        now, every = self._context.config.monotonic(), self._context.checkpoints.every
        if every <= 0 or now - self._last.setdefault(model_id, now) < every:
            return
        model = self._context.history.models[model_id]
        name = f"auto-{model.step}"
        if tinker_path(model_id, "weights", name) in self._context.history.checkpoints:
            return  # the same step again, after a load: the next boundary has another name
        failing = f"automatic checkpoint of {model_id}"
        try:
            with self._context.underway.of(f"the automatic checkpoint of {model_id}"):
                await self._take(engine, generation, model, name)
        except EngineRefused as refused:
            log.error("automatic checkpoint failed", model=model_id, name=name, error=refused.error)
            self._context.storage_errors[failing] = refused.error
            return
        self._context.storage_errors.pop(failing, None)
        self._last[model_id] = now
        await self._prune(model)
        await self._sweep(model)

    async def _take(self, engine: Engine, generation: int, model: Model, name: str) -> None:
        context, model_id = self._context, model.info.model_id
        stream = context.history.streams[model_id]
        last = stream.entries[stream.done - 1]
        assert last.ended is not None, "what lies below `done` has ended"
        place = context.states.place("weights", model_id, last.seq, generation)
        written = await engine.write(model_id, last.seq, place.path, "all")
        manifest = Manifest(
            kind="weights",
            key=place.key,
            model=model_id,
            operation=request_id(model_id, last.seq),
            seq=last.seq,
            step=model.step,
            stands_on=last.ended.position,
            base_model=context.config.base_model,
            lora=model.info.lora,
            alpha=ALPHA,
            sha256=written.sha256,
            size=written.size,
            time=context.config.now(),
            name=name,
        )
        await context.states.commit(manifest)
        stored = Stored("weights", place.key, written.sha256, written.size, manifest.time)
        record = Autosaved(model_id, last.seq, name, model.step, stored)
        position, durable = context.journal.append(record)
        await asyncio.shield(durable)
        context.history.apply(record, position)
        log.info("automatic checkpoint stored", model=model_id, name=name, bytes=written.size)

    async def _prune(self, model: Model) -> None:
        """Delete what is superseded. It is off the list before it is off the disk, and never while it is in use."""
        context = self._context
        surplus = list(model.automatic.values())[: -context.checkpoints.keep]
        for checkpoint in surplus:
            used = in_use(context.history)  # anew for each: a load may have been accepted during the last one's write
            gone = checkpoint.stored.key not in model.automatic  # removed in the meantime
            if gone or checkpoint.frozen in used or checkpoint.path in used:
                continue
            record = Pruned(model.info.model_id, checkpoint.stored.key)
            position, durable = context.journal.append(record)
            context.history.apply(record, position)  # at once: a load that is accepted from now on must not find it
            await asyncio.shield(durable)

    async def _sweep(self, model: Model) -> None:
        """Delete the files of what was pruned, and of what an earlier incarnation never got to journal."""
        context, model_id = self._context, model.info.model_id
        stream = context.history.streams[model_id]
        for key, writer, seq in await context.states.keys("weights", model_id):
            if context.history.needs_file(model_id, key) or not self._at_boundary(stream, seq):
                continue
            if key in model.pruned or writer < context.config.incarnation.number:
                await context.states.delete("weights", model_id, key)
                model.pruned.discard(key)

    def _at_boundary(self, stream: Stream, seq: int) -> bool:
        """Whether a checkpoint with this number was written after an optim_step, not by an operation that saves."""
        entry = stream.entries.get(seq)
        if entry is not None:
            return isinstance(entry.args, OptimStep)
        # What that operation was is forgotten; but it has ended, and what an ended one stored is known.
        return stream.knows(seq)
