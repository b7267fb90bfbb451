"""The journal that this incarnation appends to: group commit, with the fence read after each flush."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NoReturn

import structlog

from everloop_trainer.session.errors import Fenced, JournalDamaged, Replaced, StorageFailed
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import BaseSeal, Open, Record, Seal
from everloop_trainer.store import layout
from everloop_trainer.store.bases import read_kept
from everloop_trainer.store.epochs import read_fence
from everloop_trainer.store.files import AppendFile, Files
from everloop_trainer.store.places import Lineage, Place, Places, base_path
from everloop_trainer.store.sealed import EMPTY, read_body
from everloop_trainer.store.segments import MAGIC, encode
from everloop_trainer.store.space import is_full, try_space

PROBE_INTERVAL = 1.0
SLOW = 5.0
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    frame: bytes
    future: asyncio.Future[None]
    durable: bool


@dataclass(frozen=True, slots=True)
class _Rotation:
    """In the queue: what stands behind it goes to the next file.

    `opened` is that file's first record, which still lacks the seal of the file before, `length` bytes long; `end` is
    where that record ends in the incarnation's journal.
    """

    opened: Open
    length: int
    end: int
    future: asyncio.Future[None]


class JournalWriter:
    """session.ports.Journal over new files. Records that arrive while a flush runs share the next one.

    Args:
        files: where the journal lies.
        opened: the first record, which is still to be appended; the file of this incarnation must not exist yet.
        places: where the records of the sealed history lie.
        probe_interval: seconds between two tries whether full storage takes writes again.
        slow: seconds of one write after which it counts as trouble.
    """

    def __init__(
        self,
        files: Files,
        opened: Open,
        places: Places,
        *,
        probe_interval: float = PROBE_INTERVAL,
        slow: float = SLOW,
    ) -> None:
        self._files = files
        self._number = opened.number
        self._opened = opened
        self._places = places
        self._file: AppendFile | None = None
        self._digest = hashlib.sha256()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._queue: list[_Waiting | _Rotation] = []
        self._task: asyncio.Task[None] | None = None
        self._start = 0
        self._end = len(MAGIC)
        self._written = len(MAGIC)
        self._flushed = 0
        self._probe_interval = probe_interval
        self._slow = slow
        self._writing_since: float | None = None
        self._full = ""
        self._closing = False
        self._failure: Fenced | StorageFailed | None = None
        self.flushes = 0
        self.appended = 0

    @property
    def number(self) -> int:
        """This incarnation."""
        return self._number

    def counts(self, position: Position) -> bool:
        """Whether the record at a position belongs to the history (its own, or the sealed one)."""
        if position.incarnation == self._number:
            return position.offset < self._end
        return position.offset < self._places.lengths.get(position.incarnation, 0)

    @property
    def lineage(self) -> Lineage:
        """The history up to the file that is being appended to."""
        return Lineage(self._opened.base, self._opened.seals)

    @property
    def places(self) -> Places:
        """Where the records of that history lie."""
        return self._places

    @property
    def segment(self) -> int:
        """Which file of this incarnation is being appended to."""
        return self._opened.segment

    @property
    def end(self) -> int:
        """How long this incarnation's journal is, in bytes over all its files; `appended` counts the records."""
        return self._end

    async def rotate(self, base: BaseSeal | None = None) -> None:
        """Go on in a new file, whose first record seals the one before; with `base`, the history stands on it then.

        Ends once that record is flushed and the fence was read. Only one rotation at a time.
        """
        if self._failure is not None:
            raise self._failure
        last, start = self._opened, self._end
        first = None if base is None else (base.incarnation, base.segment)
        opened = replace(
            last,
            seals=tuple(old for old in last.seals if first is None or (old.incarnation, old.segment) >= first),
            segment=last.segment + 1,
            start=start,
            base=base or last.base,
        )
        length = start - self._start
        # What is appended meanwhile stands behind this record, so its length must be known now; its hash is not yet.
        alike = replace(opened, seals=(*opened.seals, Seal(self._number, length, EMPTY, last.segment)))
        end = start + len(MAGIC) + len(encode(alike, b"", 0))
        rotation = _Rotation(opened, length, end, asyncio.get_running_loop().create_future())
        rotation.future.add_done_callback(_retrieve)
        self._start, self._end = start, end
        self._queue.append(rotation)
        self._wake()
        await asyncio.shield(rotation.future)

    def adopt(self, places: Places) -> None:
        """Find records at these places from now on."""
        self._places = places

    def append(self, record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
        """See session.ports.Journal."""
        return self._enqueue(record, body, durable=True)

    def note(self, record: Record) -> tuple[Position, asyncio.Future[None]]:
        """See session.ports.Journal."""
        return self._enqueue(record, b"", durable=False)

    def _enqueue(self, record: Record, body: bytes, *, durable: bool) -> tuple[Position, asyncio.Future[None]]:
        if self._failure is not None:
            raise self._failure
        frame = encode(record, body, max(0, self._flushed - self._start))
        position = Position(self._number, self._end)
        self._end += len(frame)
        self.appended += 1
        waiting = _Waiting(frame, asyncio.get_running_loop().create_future(), durable)
        waiting.future.add_done_callback(_retrieve)
        self._queue.append(waiting)
        self._wake()
        return position, waiting.future

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_out(), name="journal")

    async def _write_out(self) -> None:
        while self._queue and self._failure is None:
            batch = self._take()
            if isinstance(batch, _Rotation):
                await self._turn_over(batch)
            else:
                await self._write_batch(batch)

    def _take(self) -> list[_Waiting] | _Rotation:
        """What is written next: everything that waits, up to the next rotation."""
        batch: list[_Waiting] = []
        for index, item in enumerate(self._queue):
            if isinstance(item, _Rotation):
                self._queue = self._queue[index:] if batch else self._queue[1:]
                return batch or item
            batch.append(item)
        self._queue = []
        return batch

    async def _write_batch(self, batch: list[_Waiting]) -> None:
        durable = any(waiting.durable for waiting in batch)
        data = b"".join(waiting.frame for waiting in batch)
        if await self._on_thread(lambda: self._write(data, durable), len(data), [each.future for each in batch]):
            self._written += len(data)
            if durable:
                self._flushed = self._written
            for waiting in batch:
                waiting.future.set_result(None)

    async def _turn_over(self, rotation: _Rotation) -> None:
        seal = Seal(self._number, rotation.length, self._digest.hexdigest(), rotation.opened.segment - 1)
        opened = replace(rotation.opened, seals=(*rotation.opened.seals, seal))
        if await self._on_thread(lambda: self._begin_segment(opened), 0, [rotation.future]):
            self._opened = opened
            self._places = self._places.add(seal)
            self._written = self._flushed = rotation.end
            rotation.future.set_result(None)

    async def _on_thread(self, work: Callable[[], None], size: int, waiting: list[asyncio.Future[None]]) -> bool:
        """Whether the work went well; if it did not, this journal is over, and who waits is told."""
        self._writing_since = time.monotonic()
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except Fenced as fenced:
            self._fail(fenced, waiting)
        except Exception as error:  # noqa: BLE001 - whatever it was, what is on disk now is no longer known
            if isinstance(error, OSError) and is_full(error.errno):
                await self._wait_for_space(str(error), size)
            self._fail(StorageFailed(f"{layout.journal(self._number, self.segment)}: {error!r}"), waiting)
        else:
            return True
        finally:
            self._writing_since = None
        return False

    def _write(self, data: bytes, durable: bool) -> None:
        """Runs on the journal's own thread."""
        if self._file is None:
            self._file = self._files.open_append(layout.journal(self._number))
            self._put(self._file, MAGIC)
        self._put(self._file, data)
        if durable:
            self._file.flush()
            self.flushes += 1
            read_fence(self._files, self._number)

    def _begin_segment(self, opened: Open) -> None:
        """Runs on the journal's own thread. Nothing behind the seal is acknowledged before the old file is durable."""
        assert self._file is not None, "the first record was written long ago"
        self._file.flush()
        new = self._files.open_append(layout.journal(self._number, opened.segment))
        old, self._file, self._digest = self._file, new, hashlib.sha256()
        old.close()
        self._put(new, MAGIC + encode(opened, b"", 0))
        new.flush()
        self.flushes += 2
        read_fence(self._files, self._number)

    def _put(self, file: AppendFile, data: bytes) -> None:
        file.append(data)
        self._digest.update(data)

    async def _wait_for_space(self, error: str, size: int) -> None:
        """Acknowledge nothing until `size` bytes can be written, or this incarnation is over for another reason.

        Where the file ends is no longer known, so nothing is appended to it: a new incarnation goes on.
        """
        log.error("storage takes no more: waiting until it does", error=error)
        self._full = error
        loop = asyncio.get_running_loop()
        while self._failure is None and not self._closing:
            await asyncio.sleep(self._probe_interval)
            try:
                await loop.run_in_executor(self._executor, try_space, self._files, size)
            except OSError as still:
                self._full = str(still)
                if not is_full(still.errno):
                    return
            else:
                log.info("storage takes writes again: a new incarnation goes on")
                return

    async def out_of_space(self, error: str) -> NoReturn:
        """Another write than the journal's found no space: hold everything until there is some, and only then fail.

        Raises Fenced, or StorageFailed, so that a new incarnation goes on from what is durable.
        """
        await self._wait_for_space(error, 0)
        self._fail(StorageFailed(error), [])
        assert self._failure is not None, "set a line above"
        raise self._failure

    @property
    def trouble(self) -> str:
        """See session.ports.Journal."""
        if self._full:
            return self._full
        since = self._writing_since
        if since is not None and (seconds := time.monotonic() - since) > self._slow:
            return f"{layout.journal(self._number)}: a write has been under way for {seconds:.0f} s"
        return ""

    def _fail(self, failure: Fenced | StorageFailed, futures: list[asyncio.Future[None]]) -> None:
        """Nothing that was or will be appended is acknowledged from here on."""
        if self._failure is None:
            self._failure = failure
            log.error("journal ended", journal=layout.journal(self._number, self.segment), reason=str(failure))
        waiting, self._queue = self._queue, []
        for future in (*futures, *(each.future for each in waiting)):
            future.set_exception(self._failure)

    async def read(self, position: Position) -> bytes:
        """See session.ports.Journal."""
        place = self._find(position)
        while True:
            try:
                return await asyncio.to_thread(read_body, self._files, place)
            except OSError as error:
                before, place = place, self._find(position)
                if place == before or not isinstance(error, FileNotFoundError):
                    raise StorageFailed(f"{before.path}: {error}") from error

    def _find(self, position: Position) -> Place:
        if position.incarnation == self._number and position.offset >= self._opened.start:
            path = layout.journal(self._number, self.segment)
            return Place(path, position.offset - self._opened.start, self._end - self._opened.start)
        place = self._places.find(position)
        if place is None:
            path = layout.journal(position.incarnation)
            if self.counts(position):
                raise Replaced(f"{path}: the record at offset {position.offset} was compacted")
            raise JournalDamaged(f"{path}: there is no record at offset {position.offset}")
        return place

    async def read_kept(self, base: str, offset: int) -> tuple[Record, bytes]:
        """See session.ports.Journal."""
        try:
            return await asyncio.to_thread(read_kept, self._files, base, offset)
        except FileNotFoundError as error:
            current = self._places.base
            if current is not None and base_path(current) != base:
                raise Replaced(f"{base} was compacted") from error
            raise StorageFailed(f"{base}: {error}") from error
        except OSError as error:
            raise StorageFailed(f"{base}: {error}") from error

    async def check_fence(self) -> None:
        """See session.ports.Journal."""
        if self._failure is not None:
            raise self._failure
        try:
            await asyncio.to_thread(read_fence, self._files, self._number)
        except Fenced as fenced:
            self._fail(fenced, [])
            raise
        except OSError as error:
            failure = StorageFailed(f"{layout.EPOCHS}: {error}")
            self._fail(failure, [])
            raise failure from error

    async def close(self) -> None:
        """Write out what is queued and let the file go; what nobody waited for is not flushed."""
        self._closing = True
        if self._task is not None:
            await self._task
        self._executor.shutdown(wait=True)
        if self._file is not None:
            self._file.close()
            self._file = None


def _retrieve(future: asyncio.Future[None]) -> None:
    """A failure is told to whoever awaits; that nobody does is no error of its own."""
    if not future.cancelled():
        future.exception()
