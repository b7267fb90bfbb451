"""Keeps the history short while the session serves: notes what was fetched, and has the journal compacted when due."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from everloop_trainer.session.base import Base
from everloop_trainer.session.context import Context
from everloop_trainer.session.errors import CompactionAbandoned, StorageFailed
from everloop_trainer.session.numbers import Numbers
from everloop_trainer.session.recovery import SPARED, last_load, usable
from everloop_trainer.session.retention import Retention
from everloop_trainer.session.streams import Owed, Stream

WHAT = "compaction of the journal"
FIRST_DELAY, LONGEST_DELAY = 60.0, 3600.0
"""Seconds from a compaction that was abandoned to the next try: twice as long each time, since each reads it all."""
AT_ONCE = 500
"""Entries that are dropped from memory before others have their turn."""
log = structlog.get_logger(__name__)


class Compactor(Protocol):
    """What puts a base in the place of journal files. Raises Fenced and StorageFailed as the journal does."""

    @property
    def due(self) -> bool:
        """Whether there is enough behind the last base."""

    async def compact(self, floors: Mapping[str, int], expired: Mapping[str, Numbers]) -> Base:
        """Write a base for the history up to now and let it count; arguments as of `base.cut`.

        Nothing is deleted yet: the facts in memory have to follow the base first, then comes `replace`. Raises
        CompactionAbandoned.
        """

    async def replace(self, base: Base) -> None:
        """Read records from the base, which counts, and delete the files that it stands for."""


class Compacting:
    """Runs beside the session.

    Args:
        context: shared with the service.
        compactor: what does it to the journal.
        calm: whether every model is in an engine, so that nobody reads old records just now.
    """

    def __init__(self, context: Context, compactor: Compactor, calm: Callable[[], bool]) -> None:
        self._context = context
        self._compactor = compactor
        self._calm = calm
        self._delay = FIRST_DELAY
        self._not_before = -math.inf
        self._retention = Retention(context.history.streams.values(), context.config.monotonic())

    def fetched(self, stream: str, seq: int) -> None:
        """A result is about to be handed out; the first time counts."""
        if seq not in self._context.history.streams[stream].fetched:
            self._retention.fetched(stream, seq, self._context.config.monotonic())

    async def run(self) -> None:
        """Until cancelled. Raises Fenced or StorageFailed."""
        while True:
            await asyncio.sleep(self._context.config.fence_interval)
            if self._context.journal.trouble:
                continue
            await self._note_fetched()
            if self._compactor.due and self._calm() and self._context.config.monotonic() >= self._not_before:
                await self._compact()

    async def _note_fetched(self) -> None:
        """Not flushed: what is lost with the machine is kept longer than it must be, that is all."""
        for record in self._retention.take_new():
            position, noted = self._context.journal.note(record)
            self._context.history.apply(record, position)
            await asyncio.shield(noted)

    async def _compact(self) -> None:
        context, floors = self._context, dict[str, int]()
        unread = ""
        for name in list(context.history.models):
            try:
                floors[name] = await self._floor(name)
            except StorageFailed as error:  # of this model nothing more is left out; others have nothing to do with it
                unread = f"a snapshot of {name} cannot be read: {error}"
                log.error("snapshot not read", model=name, error=str(error))
        expired = self._retention.expired(context.config.monotonic())
        try:
            base = await self._compactor.compact(floors, expired)
        except CompactionAbandoned as abandoned:
            log.error("journal not compacted", error=str(abandoned))
            context.storage_errors[WHAT] = str(abandoned)
            self._not_before = context.config.monotonic() + self._delay
            self._delay = min(2 * self._delay, LONGEST_DELAY)
            return
        self._delay = FIRST_DELAY
        if unread:
            context.storage_errors[WHAT] = unread
        else:
            context.storage_errors.pop(WHAT, None)
        for facts in base.streams:
            gone = Numbers(facts.gone)
            await self._shorten(context.history.streams[facts.name], facts.floor, base.owed[facts.name], gone)
            self._retention.forget(facts.name, gone)
        await self._compactor.replace(base)

    async def _floor(self, model: str) -> int:
        """The number of the older of the newest two snapshots that are whole; without two, the floor stays.

        Only then what leads to them can be forgotten: should the newest one not be readable, the one before it serves.
        """
        context = self._context
        stream = context.history.streams[model]
        load = last_load(stream)
        stored = await context.states.snapshots(model)
        whole = 0
        for snapshot in usable(stream, stored, since=load.seq if load is not None else 0):
            whole += await context.states.intact(snapshot)
            if whole == SPARED:
                return snapshot.seq
        return stream.floor

    async def _shorten(self, stream: Stream, floor: int, owed: Owed, gone: Numbers) -> None:
        """Let the facts of a stream follow its base. Whatever of it is asked for meanwhile is found."""
        stream.floor, stream.owed, stream.gone = floor, owed, gone
        stream.fetched = stream.fetched.without(gone)
        for count, seq in enumerate(list(stream.entries)):
            if seq in gone or owed.find(seq) is not None:
                del stream.entries[seq]
            if count % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
