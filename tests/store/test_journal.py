"""The journal acknowledges what is on disk and still ours, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from everloop_trainer.session.errors import Fenced, StorageFailed
from everloop_trainer.session.records import Record, Try
from everloop_trainer.store.epochs import claim
from everloop_trainer.store.journal import JournalWriter
from everloop_trainer.store.opening import open_store
from tests.session.world import TIME, A, claimant
from tests.store.crash_files import CrashFiles, Disk
from tests.store.records import accept


@asynccontextmanager
async def opened(files: CrashFiles, attempt: int = 1) -> AsyncIterator[JournalWriter]:
    store = await open_store(files, claimant(attempt, f"pod-{attempt}"), TIME)
    try:
        yield store.journal
    finally:
        await store.journal.close()


async def recovered(disk: Disk, attempt: int) -> list[Record]:
    store = await open_store(CrashFiles(disk), claimant(attempt, f"pod-{attempt}"), TIME)
    await store.journal.close()
    return [record for _, record in store.history]


async def test_an_acknowledged_record_outlasts_power_loss() -> None:
    """What append confirmed is in the history of the next incarnation."""
    disk = Disk()
    async with opened(CrashFiles(disk)) as journal:
        await journal.append(accept(1), b"body")[1]
    disk.lose_power()
    assert accept(1) in await recovered(disk, 2)


async def test_without_the_flush_an_acknowledged_record_would_be_lost() -> None:
    """The test above can fail: a disk that forgets flushes loses the record."""
    disk = Disk()
    async with opened(CrashFiles(disk, ignore_flushes=True)) as journal:
        await journal.append(accept(1))[1]
    disk.lose_power()
    assert accept(1) not in await recovered(disk, 2)


async def test_nothing_is_acknowledged_before_its_flush_ends() -> None:
    """A record waits for the flush that covers it, however long the disk takes."""
    files = CrashFiles(Disk())
    async with opened(files) as journal:
        started, go = threading.Event(), threading.Event()

        def stall() -> None:
            started.set()
            assert go.wait(10)

        files.on_flush = stall
        durable = journal.append(accept(1))[1]
        await asyncio.to_thread(started.wait, 10)
        assert not durable.done()
        go.set()
        await durable


async def test_appends_that_wait_share_one_flush() -> None:
    """A hundred records that arrive during one flush cost one more."""
    files = CrashFiles(Disk())
    async with opened(files) as journal:
        started, go = threading.Event(), threading.Event()

        def stall() -> None:
            started.set()
            assert go.wait(10)

        before, files.on_flush = files.flushes, stall
        first = journal.append(accept(0))[1]
        await asyncio.to_thread(started.wait, 10)
        others = [journal.append(accept(seq))[1] for seq in range(1, 101)]
        go.set()
        await asyncio.gather(first, *others)
        assert files.flushes - before == 2


async def test_the_event_loop_runs_while_the_disk_stalls() -> None:
    """A slow flush holds up nobody but those who wait for it."""
    files = CrashFiles(Disk())
    async with opened(files) as journal:
        go = threading.Event()
        files.on_flush = lambda: assert_true(go.wait(10))
        durable = journal.append(accept(1))[1]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not durable.done()
        go.set()
        await durable


def assert_true(value: bool) -> None:
    assert value


async def test_a_failed_flush_is_final() -> None:
    """After one failed fdatasync nothing is acknowledged any more, even if the disk says that it works again."""
    files = CrashFiles(Disk())
    async with opened(files) as journal:
        files.fail_flush = True
        first = journal.append(accept(1))[1]
        second = journal.append(accept(2))[1]
        with pytest.raises(StorageFailed, match="Input/output error"):
            await first
        with pytest.raises(StorageFailed):
            await second
        files.fail_flush = False
        with pytest.raises(StorageFailed):
            journal.append(accept(3))
        with pytest.raises(StorageFailed):
            journal.note(Try(A, 1, 1))
        with pytest.raises(StorageFailed):
            await journal.check_fence()


async def test_any_other_failure_is_final_too() -> None:
    """Whatever ends a write, nobody waits for ever, and nothing is appended behind bytes that nobody knows."""
    files = CrashFiles(Disk())

    def exhaust() -> None:
        raise MemoryError

    async with opened(files) as journal:
        files.on_flush = exhaust
        with pytest.raises(StorageFailed, match="MemoryError"):
            await asyncio.wait_for(journal.append(accept(1))[1], 10)
        files.on_flush = None
        with pytest.raises(StorageFailed):
            journal.append(accept(2))


async def test_who_finds_the_storage_full_goes_no_further() -> None:
    """Once there is space again the incarnation ends, for whoever had waited for it too."""
    store = await open_store(CrashFiles(Disk()), claimant(), TIME, probe_interval=0.001)
    with pytest.raises(StorageFailed, match="No space left"):
        await store.journal.out_of_space("No space left")
    await store.journal.close()


async def test_the_fence_is_read_after_the_flush() -> None:
    """A newer incarnation that claims while we flush may have read the journal before: no acknowledgement."""
    disk = Disk()
    files = CrashFiles(disk)
    async with opened(files) as journal:
        files.on_flush = lambda: void(claim(CrashFiles(disk), 2, "pod-2", TIME))
        with pytest.raises(Fenced, match="superseded by incarnation 2"):
            await journal.append(accept(1))[1]
        with pytest.raises(Fenced):
            journal.append(accept(2))


def void(_: object) -> None:
    return


async def test_a_note_is_written_but_not_flushed() -> None:
    """A note survives the death of the process, not that of the machine; and it costs no flush."""
    for power_lost in (False, True):
        disk = Disk()
        files = CrashFiles(disk)
        async with opened(files) as journal:
            before = files.flushes
            await journal.note(Try(A, 1, 99))[1]
            assert files.flushes == before
        if power_lost:
            disk.lose_power()
        assert (Try(A, 1, 99) in await recovered(disk, 2)) is not power_lost


async def test_bodies_are_read_back_by_position() -> None:
    """From the journal that is being written, and from a sealed one."""
    disk = Disk()
    async with opened(CrashFiles(disk)) as journal:
        position, durable = journal.append(accept(1), b"first body")
        await durable
        assert await journal.read(position) == b"first body"
    async with opened(CrashFiles(disk), attempt=2) as journal:
        assert await journal.read(position) == b"first body"
