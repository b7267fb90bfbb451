"""The journal that this incarnation appends to: group commit, with the fence read after each flush."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import structlog

from everloop_trainer.session.errors import Fenced, StorageFailed
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Record
from everloop_trainer.store import layout
from everloop_trainer.store.epochs import read_fence
from everloop_trainer.store.files import AppendFile, Files
from everloop_trainer.store.sealed import read_body
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


class JournalWriter:
    """session.ports.Journal over a new file. Records that arrive while a flush runs share the next one.

    Args:
        files: where the journal lies.
        number: this incarnation; its journal file must not exist yet.
        sealed: length that counts of each older journal.
        probe_interval: seconds between two tries whether full storage takes writes again.
        slow: seconds of one write after which it counts as trouble.
    """

    def __init__(
        self,
        files: Files,
        number: int,
        sealed: Mapping[int, int],
        *,
        probe_interval: float = PROBE_INTERVAL,
        slow: float = SLOW,
    ) -> None:
        self._files = files
        self._number = number
        self._sealed = sealed
        self._file: AppendFile | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._queue: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None
        self._end = len(MAGIC)
        self._flushed = 0
        self._probe_interval = probe_interval
        self._slow = slow
        self._writing_since: float | None = None
        self._full = ""
        self._closing = False
        self._failure: Fenced | StorageFailed | None = None
        self.flushes = 0

    @property
    def number(self) -> int:
        """This incarnation."""
        return self._number

    def counts(self, position: Position) -> bool:
        """Whether the record at a position belongs to the history (its own, or the sealed one)."""
        if position.incarnation == self._number:
            return position.offset < self._end
        return position.offset < self._sealed.get(position.incarnation, 0)

    def append(self, record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
        """See session.ports.Journal."""
        return self._enqueue(record, body, durable=True)

    def note(self, record: Record) -> tuple[Position, asyncio.Future[None]]:
        """See session.ports.Journal."""
        return self._enqueue(record, b"", durable=False)

    def _enqueue(self, record: Record, body: bytes, *, durable: bool) -> tuple[Position, asyncio.Future[None]]:
        if self._failure is not None:
            raise self._failure
        frame = encode(record, body, self._flushed)
        position = Position(self._number, self._end)
        self._end += len(frame)
        waiting = _Waiting(frame, asyncio.get_running_loop().create_future(), durable)
        waiting.future.add_done_callback(_retrieve)
        self._queue.append(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_out(), name="journal")
        return position, waiting.future

    async def _write_out(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue and self._failure is None:
            batch, self._queue = self._queue, []
            durable = any(waiting.durable for waiting in batch)
            end = self._end  # nothing is enqueued between taking the queue and reading this
            data = b"".join(waiting.frame for waiting in batch)
            self._writing_since = time.monotonic()
            try:
                await loop.run_in_executor(self._executor, self._write, data, durable)
            except Fenced as fenced:
                self._fail(fenced, batch)
            except Exception as error:  # noqa: BLE001 - whatever it was, what is on disk now is no longer known
                if isinstance(error, OSError) and is_full(error.errno):
                    await self._wait_for_space(str(error), len(data))
                self._fail(StorageFailed(f"{layout.journal(self._number)}: {error!r}"), batch)
            else:
                if durable:
                    self._flushed = end
                for waiting in batch:
                    waiting.future.set_result(None)
            finally:
                self._writing_since = None

    def _write(self, data: bytes, durable: bool) -> None:
        """Runs on the journal's own thread."""
        if self._file is None:
            self._file = self._files.open_append(layout.journal(self._number))
            self._file.append(MAGIC)
        self._file.append(data)
        if durable:
            self._file.flush()
            self.flushes += 1
            read_fence(self._files, self._number)

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

    def _fail(self, failure: Fenced | StorageFailed, batch: list[_Waiting]) -> None:
        """Nothing that was or will be appended is acknowledged from here on."""
        if self._failure is None:
            self._failure = failure
            log.error("journal ended", journal=layout.journal(self._number), reason=str(failure))
        waiting, self._queue = batch + self._queue, []
        for each in waiting:
            each.future.set_exception(self._failure)

    async def read(self, position: Position) -> bytes:
        """See session.ports.Journal."""
        own = position.incarnation == self._number
        limit = self._end if own else self._sealed.get(position.incarnation, 0)
        try:
            return await asyncio.to_thread(read_body, self._files, position, limit)
        except OSError as error:
            raise StorageFailed(f"{layout.journal(position.incarnation)}: {error}") from error

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
