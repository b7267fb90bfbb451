"""The history: what an incarnation seals counts for ever, what a zombie adds never does."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib

import pytest

from everloop_trainer.session.errors import Fenced, JournalDamaged, StorageFailed
from everloop_trainer.session.records import Record
from everloop_trainer.store import layout
from everloop_trainer.store.epochs import claim
from everloop_trainer.store.files import AppendFile
from everloop_trainer.store.opening import OpenedStore, open_store
from everloop_trainer.store.segments import encode, read_file
from tests.session.world import TIME, claimant
from tests.store.crash_files import CrashFiles, Disk
from tests.store.records import accept


async def opened(disk: Disk, attempt: int, pod: str | None = None, files: CrashFiles | None = None) -> OpenedStore:
    return await open_store(files or CrashFiles(disk), claimant(attempt, pod or f"pod-{attempt}"), TIME)


def accepted(store: OpenedStore) -> list[Record]:
    return [record for _, record in store.history if record in [accept(seq) for seq in range(100)]]


async def test_a_chain_of_zombies() -> None:
    """Two old incarnations go on appending: no acknowledgement, and the third and fourth see one same history."""
    disk = Disk()
    first = await opened(disk, 1)
    await first.journal.append(accept(1))[1]
    second = await opened(disk, 2)
    assert accepted(second) == [accept(1)]
    with pytest.raises(Fenced):
        await first.journal.append(accept(11))[1]
    await second.journal.append(accept(2))[1]
    third = await opened(disk, 3)
    assert accepted(third) == [accept(1), accept(2)]
    with pytest.raises(Fenced):
        await second.journal.append(accept(12))[1]
    with pytest.raises(Fenced):
        first.journal.append(accept(13))
    await third.journal.append(accept(3))[1]
    fourth = await opened(disk, 4)
    assert accepted(fourth) == [accept(1), accept(2), accept(3)]
    for store in (first, second, third, fourth):
        await store.journal.close()


class ClaimBetweenWrites(CrashFiles):
    """The old incarnation writes just before and just after this process claims incarnation 2."""

    old: OpenedStore
    acknowledged: list[int]

    def create(self, path: str, data: bytes) -> None:
        if path != layout.epoch(2):
            super().create(path, data)
            return
        self.acknowledged = []
        self._old_writes(1)
        super().create(path, data)
        self._old_writes(2)

    def _old_writes(self, seq: int) -> None:
        try:
            self.old.journal._write(encode(accept(seq), b"", 0), durable=True)
        except Fenced:
            return
        self.acknowledged.append(seq)


async def test_a_zombie_writes_around_the_claim() -> None:
    """The claim comes before the reading: what was acknowledged before it is in the history, and nothing is after."""
    disk = Disk()
    old = await opened(disk, 1)
    files = ClaimBetweenWrites(disk)
    files.old = old
    new = await opened(disk, 2, files=files)
    assert files.acknowledged == [1]
    assert accept(1) in accepted(new)
    await old.journal.close()
    await new.journal.close()


async def test_a_newcomer_that_dies_before_its_first_record_seals_nothing() -> None:
    """The incarnation after it reads the older journal to its end, as the dead one would have."""
    disk = Disk()
    first = await opened(disk, 1)
    await first.journal.append(accept(1))[1]
    claim(CrashFiles(disk), 2, "pod-2", TIME)
    third = await opened(disk, 3)
    assert accepted(third) == [accept(1)]
    await first.journal.close()
    await third.journal.close()


class SleepsBeforeOpening(CrashFiles):
    """Just before this process creates its journal, attempt 3 opens the storage, acknowledges a record and ends."""

    def open_append(self, path: str) -> AppendFile:
        async def overtake() -> None:
            store = await opened(self.disk, 3)
            await store.journal.append(accept(30))[1]
            await store.journal.close()

        asyncio.run(overtake())
        return super().open_append(path)


async def test_a_late_opener_does_not_rule_over_its_successor() -> None:
    """An incarnation that claimed, slept, and opens its journal after a newer one sealed it at nothing."""
    disk = Disk()
    first = await opened(disk, 1)
    await first.journal.append(accept(1))[1]
    with pytest.raises(Fenced):
        await opened(disk, 2, files=SleepsBeforeOpening(disk))
    fourth = await opened(disk, 4)
    assert accepted(fourth) == [accept(1), accept(30)]
    await first.journal.close()
    await fourth.journal.close()


async def test_what_a_killed_process_left_unflushed_is_made_durable_before_it_is_sealed() -> None:
    """A restart in place may read what only the page cache holds; a later power loss must not take it back."""
    disk = Disk()
    files = CrashFiles(disk)
    first = await opened(disk, 1, files=files)
    files.ignore_flushes = True  # killed after write, before fdatasync
    await first.journal.append(accept(1))[1]
    await first.journal.close()
    second = await opened(disk, 1, "pod-1")
    assert accepted(second) == [accept(1)]
    assert second.incarnation.boot == 2
    await second.journal.close()
    disk.lose_power()
    third = await opened(disk, 1, "pod-1")
    assert accepted(third) == [accept(1)]
    await third.journal.close()


async def test_a_torn_tail_is_dropped_and_nobody_appends_behind_it() -> None:
    """Half a record at the end of the newest journal goes; the next record is in a file of its own."""
    disk = Disk()
    first = await opened(disk, 1)
    await first.journal.append(accept(1))[1]
    await first.journal.close()
    content = disk.files[layout.journal(1)]
    whole = content.written
    content.written = content.flushed = whole + whole[-30:-5]
    second = await opened(disk, 2)
    assert accepted(second) == [accept(1)]
    await second.journal.append(accept(2))[1]
    await second.journal.close()
    assert content.written == whole + whole[-30:-5]
    third = await opened(disk, 3)
    assert accepted(third) == [accept(1), accept(2)]
    await third.journal.close()


def flip(disk: Disk, number: int, what: bytes) -> bytes:
    """One bit of what the journal of an incarnation holds once becomes another; returns what is there then."""
    content = disk.files[layout.journal(number)]
    assert content.written.count(what) == 1
    flipped = what[:-1] + bytes([what[-1] ^ 0x40])
    content.written = content.flushed = content.written.replace(what, flipped)
    return flipped


async def two_sealed() -> Disk:
    """A disk with two incarnations, of which the second one has sealed the first."""
    disk = Disk()
    for attempt in (1, 2):
        store = await opened(disk, attempt)
        for seq in (2 * attempt, 2 * attempt + 1):
            await store.journal.append(accept(seq), b"body %d" % seq)[1]
        await store.journal.close()
    return disk


@pytest.mark.parametrize("number", [1, 2])
async def test_damage_to_what_a_record_says_of_itself_is_loud(number: int) -> None:
    """In sealed bytes or behind them: the next incarnation names file and offset."""
    disk = await two_sealed()
    flip(disk, number, b'"n":%d' % (2 * number))
    with pytest.raises(JournalDamaged, match=rf"journal/0000000{number}.log: damaged at offset \d+.* cannot be told"):
        await opened(disk, 3)


@pytest.mark.parametrize("damaged", [False, True])
async def test_sealed_bytes_that_are_whole_and_others_are_loud(damaged: bool) -> None:
    """What is read is not broken, but it is not what was sealed; nor is it where a body was damaged already then."""
    disk = await two_sealed()
    if damaged:
        flip(disk, 2, b"body 4")
    await (await opened(disk, 3)).journal.close()
    content = disk.files[layout.journal(2)]
    *_, last = read_file(io.BytesIO(content.written), len(content.written), "2")
    payload = content.written[last.offset + 8 : last.end].replace(b"body 5", b"body 9")
    frame = struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    content.written = content.flushed = content.written[: last.offset] + frame
    with pytest.raises(JournalDamaged, match=r"journal/00000002.log: its first \d+ bytes are not those"):
        await opened(disk, 4)


@pytest.mark.parametrize("number", [1, 2])
async def test_a_damaged_body_costs_no_record(number: int) -> None:
    """In sealed bytes or behind them. Neither it nor its mending troubles a later incarnation; other damage does."""
    disk, every = await two_sealed(), [accept(seq) for seq in (2, 3, 4, 5)]
    body = flip(disk, number, b"body %d" % (2 * number))
    for attempt in (3, 4, 5):
        store = await opened(disk, attempt)
        assert accepted(store) == every
        await store.journal.close()
        if attempt == 4:
            flip(disk, number, body)
    flip(disk, number, b'"n":%d' % (2 * number + 1))
    with pytest.raises(JournalDamaged, match=rf"journal/0000000{number}.log: damaged at offset"):
        await opened(disk, 6)


async def test_a_sealed_journal_that_vanished_is_loud() -> None:
    """A missing file is damage, not an empty history."""
    disk = Disk()
    for attempt in (1, 2):
        store = await opened(disk, attempt)
        await store.journal.append(accept(attempt))[1]
        await store.journal.close()
    del disk.files[layout.journal(1)]
    with pytest.raises(JournalDamaged, match=r"journal/00000001.log"):
        await opened(disk, 3)


async def test_a_storage_failure_while_opening_is_told_as_such() -> None:
    """A dead disk is a StorageFailed, whatever call hits it."""
    files = CrashFiles(Disk())
    files.kill()
    with pytest.raises(StorageFailed):
        await opened(files.disk, 1, files=files)
