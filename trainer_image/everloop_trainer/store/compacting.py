"""Compaction of the journal: a base in place of the files that it stands for, while the session serves on.

The journal goes on in a new file. What lies before that is read again, by a thread of its own and from the disk, so
that nothing here rests on facts in memory; what is left of it is written to a base, durable and read back. Then the
journal goes on in yet another file, whose first record names the base: with that the base counts, for this incarnation
and for every later one. Only then, and each time after a look at the fence, are the files before it deleted.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, TypeVar

import structlog

from everloop_trainer.session.base import Base, cut, restore, session_facts, stream_facts
from everloop_trainer.session.errors import CompactionAbandoned, JournalDamaged, StorageFailed
from everloop_trainer.session.history import History
from everloop_trainer.session.numbers import Numbers
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import BaseSeal
from everloop_trainer.session.streams import Owed
from everloop_trainer.store import layout
from everloop_trainer.store.bases import BaseWriter, read_base
from everloop_trainer.store.files import Files
from everloop_trainer.store.journal import JournalWriter
from everloop_trainer.store.places import Lineage, Place, Places, base_path, places_of
from everloop_trainer.store.sealed import records
from everloop_trainer.store.segments import read_frame

TURN = 0.001
"""Seconds of work and of rest, in turn, of the thread that compacts: others wait no longer for the interpreter."""
_T = TypeVar("_T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much history may follow a base before the next one is due: so many bytes or so many records.

    And always at least a quarter of the base's own size, so that what is kept is not copied too often.
    """

    bytes: int = 64 << 20
    records: int = 30_000


LIMITS = Limits()


@contextmanager
def _no_cyclic_collection() -> Iterator[None]:
    """Leave out passes of the cyclic collector: each would stop the event loop for as long as it walks the history.

    What is alive afterwards is left out of later passes too: it goes by its reference counts.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Compactor:
    """session.compacting.Compactor over a session's files.

    Args:
        records: how many records follow the base already.
    """

    def __init__(self, files: Files, journal: JournalWriter, limits: Limits, records: int) -> None:
        self._files = files
        self._journal = journal
        self._limits = limits
        self._records = records
        self._bytes = sum(seal.length for seal in journal.lineage.seals)
        self._counted = (0, 0)

    @property
    def due(self) -> bool:
        """See session.compacting.Compactor."""
        base = self._journal.places.base
        if base is not None and 4 * self._grown()[0] < base.length:
            return False
        grown = self._grown()
        return grown[0] >= self._limits.bytes or grown[1] >= self._limits.records

    def _grown(self) -> tuple[int, int]:
        """Bytes and records since the base."""
        journal = self._journal
        return self._bytes + journal.end - self._counted[0], self._records + journal.appended - self._counted[1]

    async def compact(self, floors: Mapping[str, int], expired: Mapping[str, Numbers]) -> Base:
        """See session.compacting.Compactor."""
        started = time.monotonic()
        await self._journal.rotate()
        here = self._journal.end, self._journal.appended
        before = layout.Cut(self._journal.number, self._journal.segment)
        stop = threading.Event()
        work = _Work(self._files, self._journal.lineage, self._journal.places.lengths, before, _Turns(stop))
        try:
            with _no_cyclic_collection():
                sealed, base = await asyncio.to_thread(work.run, floors, expired)
        except (OSError, JournalDamaged) as error:
            await self._give_up(before)
            raise CompactionAbandoned(str(error)) from error
        finally:
            stop.set()
        await self._journal.rotate(sealed)
        self._bytes, self._records, self._counted = 0, 0, here
        log.info(
            "journal compacted",
            base=base_path(sealed),
            bytes=sealed.length,
            read=self._journal.places.lengths[before.incarnation],
            seconds=round(time.monotonic() - started, 3),
        )
        return base

    async def replace(self, base: Base) -> None:
        """See session.compacting.Compactor."""
        lineage = self._journal.lineage
        assert lineage.base is not None, "the base counts already"
        self._journal.adopt(places_of(lineage, base))
        before = layout.Cut(lineage.base.incarnation, lineage.base.segment)
        for name in await self._io(lambda: self._files.list(layout.JOURNAL)):
            found = layout.journal_file(name)
            if found is not None and found[0] < before:
                await self._journal.check_fence()
                await self._io(partial(self._files.remove, f"{layout.JOURNAL}/{name}"))

    async def _give_up(self, before: layout.Cut) -> None:
        """Take away what was written of a base that will not count; if even that fails, the next compaction does it."""
        await self._journal.check_fence()
        try:
            await asyncio.to_thread(self._files.remove, layout.base(before))
        except OSError as error:
            log.warning("an unfinished base stays for now", base=layout.base(before), error=str(error))

    async def _io(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise StorageFailed(f"{layout.JOURNAL}: {error}") from error


class _Turns:
    """Lets the thread of the compaction work and rest in turn, and ends it once nobody waits for it any more."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._since = time.monotonic()

    def __call__(self) -> None:
        """To be called every so often, after much less than `TURN`."""
        if time.monotonic() - self._since < TURN:
            return
        if self._stop.wait(TURN):
            raise StorageFailed("compaction was stopped")
        self._since = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Work:
    """What the thread of a compaction does; raises JournalDamaged, OSError."""

    files: Files
    lineage: Lineage
    lengths: Mapping[int, int]
    before: layout.Cut
    rest: _Turns

    def run(self, floors: Mapping[str, int], expired: Mapping[str, Numbers]) -> tuple[BaseSeal, Base]:
        old = None if self.lineage.base is None else read_base(self.files, self.lineage.base)
        history = self._fold(old)
        writer = BaseWriter(self.files, self.before)
        try:
            self._write(writer, history, places_of(self.lineage, old), floors, expired)
            sealed = writer.finish()
        finally:
            writer.close()
        return sealed, read_base(self.files, sealed)

    def _fold(self, old: Base | None) -> History:
        history = History() if old is None else restore(old)
        for found in records(self.files, self.lineage):
            try:
                history.apply(found.record, found.position)
            except ValueError as error:
                where = f"journal {found.position.incarnation} at offset {found.position.offset}"
                raise JournalDamaged(f"{where}: {error}") from error
            self.rest()
        return history

    def _write(
        self,
        writer: BaseWriter,
        history: History,
        places: Places,
        floors: Mapping[str, int],
        expired: Mapping[str, Numbers],
    ) -> None:
        left = list(cut(history, floors, expired))
        copies: dict[Position, int] = {}
        owed: dict[str, Owed] = {}
        with _opened(self.files) as read:

            def copy(place: Position | int) -> int:
                self.rest()
                found = places.find(place) if isinstance(place, Position) else places.kept(place)
                assert found is not None, "it was read a moment ago"
                return writer.copy(read(found))

            for each in left:
                for entry in each.kept:
                    copies[entry.accepted] = copy(entry.accepted)
                    if entry.ended is not None and not entry.given_up:
                        copies[entry.ended.position] = copy(entry.ended.position)
                list_ = Owed()
                for seq, place in each.owed():
                    list_.numbers.append(seq)
                    list_.offsets.append(copy(place))
                owed[each.stream.name] = list_
        writer.facts(session_facts(history, self.lengths))
        for each in left:
            writer.facts(stream_facts(history, each, copies), owed[each.stream.name])
            self.rest()


@contextmanager
def _opened(files: Files) -> Iterator[Callable[[Place], bytes]]:
    """A reader of frames that keeps the last file open."""
    path = ""
    file: IO[bytes] | None = None

    def read(place: Place) -> bytes:
        nonlocal path, file
        if file is None or place.path != path:
            if file is not None:
                file.close()
            file, path = files.open_read(place.path), place.path
        framed = read_frame(file, place.offset, place.limit)
        if framed is None:
            raise JournalDamaged(f"{place.path}: the record at offset {place.offset} is broken")
        return framed

    try:
        yield read
    finally:
        if file is not None:
            file.close()
