"""How long checkpoints are kept, and who may read them: what users remove, publish and give a time, what expires, and
what a newer one of the same name has replaced.

A checkpoint goes in three steps. `Removed` takes it off the list: from then on nothing finds it. Once nothing that was
accepted before still reads it, `Dropped` says so, and then its file is deleted, unless a copy shares it. Whatever dies
in between, the next incarnation goes on from the records. Expiry is a record too: a replay reads no clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from everloop_trainer.session.context import Context
from everloop_trainer.session.history import Checkpoint, History
from everloop_trainer.session.identifiers import tinker_path
from everloop_trainer.session.operations import LoadWeights, Sample
from everloop_trainer.session.ports import About, StateKind
from everloop_trainer.session.records import Amended, Copied, Dropped, Removed
from everloop_trainer.session.times import after, instant

CHECKPOINTS: tuple[StateKind, ...] = ("weights", "sampler_weights", "external_weights")
log = structlog.get_logger(__name__)


class NoCheckpoint(Exception):
    """There is no checkpoint of that path."""


class InUse(Exception):
    """An operation that was accepted before has to read the checkpoint first; to be asked again."""


def in_use(history: History) -> set[str | None]:
    """Paths and `frozen:` names that accepted operations without a result may still read. Pure."""
    used: set[str | None] = set()
    for stream in history.streams.values():
        for entry in stream.pending.values():
            if isinstance(entry.args, LoadWeights):
                used |= {entry.args.source, entry.args.path}
            elif isinstance(entry.args, Sample):
                used.add(entry.args.weights)
    return used


def awaited(history: History) -> set[str]:
    """Paths that accepted loads will look for when it is their turn: a model's of its own checkpoints. Pure."""
    return {
        entry.args.path
        for stream in history.streams.values()
        for entry in stream.pending.values()
        if isinstance(entry.args, LoadWeights) and entry.args.source is None
    }


def expired(history: History, now: str) -> list[Checkpoint]:
    """The listed checkpoints whose time is over. Pure."""
    at = instant(now)
    listed = history.checkpoints.values()
    return [each for each in listed if each.expires is not None and instant(each.expires) <= at]


def unneeded(history: History) -> list[Checkpoint]:
    """The named checkpoints that are listed no more and that nothing reads. Pure.

    An automatic one whose name was taken over is pruned with its kind; what samplers follow stays.
    """
    off = [
        each
        for each in history.frozen.values()
        if each.path is not None and history.checkpoints.get(each.path) is not each and not _is_automatic(history, each)
    ]
    if not off:
        return []
    used = in_use(history) | set(history.inflight.values())
    return [each for each in off if each.frozen not in used]


def _is_automatic(history: History, checkpoint: Checkpoint) -> bool:
    model = history.models.get(checkpoint.model_id)
    return model is not None and checkpoint.stored.key in model.automatic


@dataclass(frozen=True, slots=True)
class Orphan:
    """A file of an earlier incarnation that is perhaps no checkpoint's; `seq`: the operation it was written by."""

    kind: StateKind
    model_id: str
    key: str
    seq: int


class Taken(Exception):
    """The training run that is to be made is there already, and is no copy."""


class Keeping:
    """Changes and removes checkpoints, by request or in time.

    Each call of a client carries its idempotency key: for 24 hours a repeat is taken for one, and changes nothing.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last: asyncio.Future[None] | None = None

    def state(self, path: str) -> tuple[Path, About]:
        """The data file of a listed checkpoint, and what it says of itself; its directory is named by its key.

        Raises NoCheckpoint.
        """
        checkpoint = self._context.history.checkpoints.get(path)
        if checkpoint is None or checkpoint.name is None:
            raise NoCheckpoint(path)
        stored, base = checkpoint.stored, self._context.config.base_model
        state = Path(self._context.states.path(stored.kind, checkpoint.home, stored.key))
        return state, About(base.name, base.revision, checkpoint.model_id, checkpoint.name)

    async def remove(self, path: str, request: str) -> None:
        """Take a checkpoint off the list; ends once that is durable.

        Who asks for a removal again, under another key, is told that it is done: an answer may have been lost.

        Raises:
            NoCheckpoint: there is none, and none was removed lately.
            InUse: a load of the same model may still find it by its path.
        """
        history = self._context.history
        repeated = (path, request) in history.handled
        checkpoint = None if repeated else history.checkpoints.get(path)
        gone = any(call.path == path and call.removed for call in history.handled.values())
        if checkpoint is not None:
            if path in awaited(history):
                raise InUse(path)
            self._remove(checkpoint, request)
        await self._settled()
        if checkpoint is None and not repeated and not gone:
            raise NoCheckpoint(path)

    async def expire_after(self, path: str, seconds: int | None, request: str) -> None:
        """Have a checkpoint removed so many seconds from now, or, with None, never; ends once that is durable.

        Raises NoCheckpoint.
        """
        expires = None if seconds is None else after(self._context.config.now(), seconds)
        await self._amend(path, request, lambda checkpoint: replace(checkpoint, expires=expires))

    async def publish(self, path: str, public: bool, request: str) -> None:
        """Let every key of the namespace read a checkpoint, or its owner's alone; ends once that is durable.

        Raises NoCheckpoint.
        """
        await self._amend(path, request, lambda checkpoint: replace(checkpoint, public=public))

    def copied(self, run: str) -> str | None:
        """The path of the copy that a training run was made to hold, whether it is still there or not."""
        history = self._context.history
        made, lost = history.copied.get(run), history.rolled_back.get(run)
        if lost is not None and lost.source:
            return next(tinker_path(run, each.kind, each.name) for each in lost.checkpoints)
        return None if made is None else made.path

    async def copy(self, path: str, run: str, seconds: int | None) -> str:
        """Make a training run that holds a copy of a checkpoint, and return the copy's path once that is durable.

        The run's name tells a repeat, whatever it asks for: it gets the path that the first got. `seconds` until the
        copy expires, None for never.

        Raises:
            NoCheckpoint: there is none of that path.
            Taken: the run is a model, or somebody tried to make it one.
        """
        history, now = self._context.history, self._context.config.now()
        copy, checkpoint = self.copied(run), history.checkpoints.get(path)
        taken = copy is None and run in history.streams
        if copy is None and checkpoint is not None and not taken:
            expires = None if seconds is None else after(now, seconds)
            log.info("checkpoint copied", path=path, run=run)
            self._append(Copied(checkpoint.model_id, checkpoint.stored.key, run, now, expires))
            copy = self.copied(run)
        await self._settled()
        if taken:
            raise Taken(run)
        if copy is None:
            raise NoCheckpoint(path)
        return copy

    async def _amend(self, path: str, request: str, change: Callable[[Checkpoint], Checkpoint]) -> None:
        history, now = self._context.history, self._context.config.now()
        repeated = (path, request) in history.handled
        checkpoint = None if repeated else history.checkpoints.get(path)
        if checkpoint is not None:
            wanted = change(checkpoint)
            key = checkpoint.stored.key
            self._append(Amended(checkpoint.model_id, key, now, request, wanted.expires, wanted.public))
        await self._settled()
        if checkpoint is None and not repeated:
            raise NoCheckpoint(path)

    async def run(self) -> None:
        """Remove what expires and delete what nothing needs, until cancelled. Raises Fenced or StorageFailed."""
        orphans = await self._orphans()
        while True:
            if not self._context.journal.trouble:
                await self._expire()
                await self._delete_unneeded()
                orphans = await self._delete_orphans(orphans)
            await asyncio.sleep(self._context.config.fence_interval)

    def _remove(self, checkpoint: Checkpoint, request: str) -> None:
        log.info("checkpoint removed", path=checkpoint.path, expired=not request)
        self._append(Removed(checkpoint.model_id, checkpoint.stored.key, self._context.config.now(), request))

    def _append(self, record: Removed | Amended | Dropped | Copied) -> None:
        """What is accepted from now on finds things so: it is journaled behind this record."""
        position, self._last = self._context.journal.append(record)
        self._context.history.apply(record, position)

    async def _settled(self) -> None:
        """Return when all that was appended is durable: also what this call only repeats. Raises as the journal."""
        if self._last is not None:
            await asyncio.shield(self._last)
        await self._context.journal.check_fence()

    async def _expire(self) -> None:
        history = self._context.history
        due = expired(history, self._context.config.now())
        if not due:
            return
        paths = awaited(history)
        for checkpoint in due:
            if checkpoint.path not in paths:
                self._remove(checkpoint, "")
        await self._settled()

    async def _delete_unneeded(self) -> None:
        for checkpoint in unneeded(self._context.history):
            self._append(Dropped(checkpoint.model_id, checkpoint.stored.key))
            await self._settled()
            if not self._context.history.needs_file(checkpoint.home, checkpoint.stored.key):
                await self._delete(checkpoint.stored.kind, checkpoint.home, checkpoint.stored.key)

    async def _delete(self, kind: StateKind, model_id: str, key: str) -> None:
        with self._context.underway.of(f"the deletion of a checkpoint of {model_id}"):
            await self._context.states.delete(kind, model_id, key)

    async def _orphans(self) -> list[Orphan]:
        """Files that earlier incarnations had dropped, or had written and never got to journal."""
        history, number = self._context.history, self._context.config.incarnation.number
        return [
            Orphan(kind, model_id, key, seq)
            for model_id in list(history.models)
            for kind in CHECKPOINTS
            for key, writer, seq in await self._context.states.keys(kind, model_id)
            if writer < number and history.streams[model_id].knows(seq)
        ]

    async def _delete_orphans(self, orphans: list[Orphan]) -> list[Orphan]:
        """Delete those that can't become a checkpoint any more; returns those that a save under way may still adopt."""
        history, undecided = self._context.history, list[Orphan]()
        for orphan in orphans:
            if orphan.seq in history.streams[orphan.model_id].pending:
                undecided.append(orphan)
            elif not history.needs_file(orphan.model_id, orphan.key):
                await self._delete(orphan.kind, orphan.model_id, orphan.key)
        return undecided
