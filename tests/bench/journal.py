"""How many small operations a second the journal takes from 64 clients while each flush takes 5 ms longer.

A client has one operation at a time: it appends the acceptance and waits until that is durable, notes the try, appends
the result and waits again. No HTTP and no engine: what is measured is that flushes are shared. What the disk beneath
needs for a flush comes on top of the 5 ms.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from everloop_trainer.session.operations import OptimStep
from everloop_trainer.session.outcomes import JSON
from everloop_trainer.session.records import Accept, Result, Try
from everloop_trainer.session.status import BaseModel
from everloop_trainer.store.files import AppendFile, PosixFiles
from everloop_trainer.store.journal import JournalWriter
from everloop_trainer.store.opening import Claimant, open_store
from tests.bench.measure import Measure

CLIENTS, OPERATIONS = 64, 100
ADDED_SECONDS = 0.005
GOAL = 1000.0
TIME = "2030-01-01T00:00:00Z"
STEP = OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
ANSWER = b'{"metrics":{"skipped_no_gradients":1.0},"type":"optim_step"}'


class SlowFiles(PosixFiles):
    """A disk whose flushes take longer."""

    def open_append(self, path: str) -> AppendFile:
        return _SlowAppendFile(super().open_append(path))


class _SlowAppendFile:
    def __init__(self, file: AppendFile) -> None:
        self._file = file

    def append(self, data: bytes) -> None:
        self._file.append(data)

    def flush(self) -> None:
        time.sleep(ADDED_SECONDS)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def run(place: Path) -> list[Measure]:
    """Raises ValueError if the journal does not hold what was acknowledged."""
    seconds, flushes = asyncio.run(_write(SlowFiles(place / "session")))
    held = asyncio.run(_count(PosixFiles(place / "session")))
    total = CLIENTS * OPERATIONS
    if held != total:
        raise ValueError(f"{total} results were acknowledged, and the journal holds {held}")
    what = f"accepted, tried and finished, {CLIENTS} clients, 5 ms added to each flush"
    return [
        Measure(what, total / seconds, "operations/s", GOAL, at_least=True),
        Measure("operations that share a flush", total / flushes, ""),
    ]


async def _write(files: PosixFiles) -> tuple[float, int]:
    store = await open_store(files, _claimant(), TIME)
    before, began = store.journal.flushes, time.perf_counter()
    await asyncio.gather(*(_client(store.journal, number) for number in range(CLIENTS)))
    seconds, flushes = time.perf_counter() - began, store.journal.flushes - before
    await store.journal.close()
    return seconds, flushes


async def _client(journal: JournalWriter, number: int) -> None:
    model = f"s-0123456789abcdef-0123456789abcdef:train:{number}"
    for seq in range(1, OPERATIONS + 1):
        await journal.append(Accept(model, seq, STEP, TIME))[1]
        journal.note(Try(model, seq, 1))
        await journal.append(Result(model, seq, True, JSON, 0), ANSWER)[1]


async def _count(files: PosixFiles) -> int:
    """Results that a successor finds."""
    store = await open_store(files, _claimant(), TIME)
    await store.journal.close()
    return sum(isinstance(record, Result) for _, record in store.history)


def _claimant() -> Claimant:
    return Claimant("bench", "journal", BaseModel("base", "", "00" * 32), 1, "pod-1")
