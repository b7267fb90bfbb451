"""Whatever happens in the middle of a compaction: the old history is there, or the new one, and they say the same."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from everloop_trainer.session.errors import Fenced, JournalDamaged, StorageFailed
from everloop_trainer.session.history import Kept
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.session.records import Try
from everloop_trainer.store import layout
from everloop_trainer.store.compacting import TURN, _Turns
from everloop_trainer.store.epochs import claim
from tests.session.compacted import compact, facts, history_of, journal_files, opened_copy, quiet
from tests.session.world import LOADS, LOOP, TIME, A, Client, Over, Running, running, states, unbroken
from tests.store.crash_files import CrashFiles, Died, Disk

Loop = list[list[Operation]]
Unbroken = tuple[dict[str, bytes], dict[str, Succeeded | Failed]]
LOOPS = pytest.mark.parametrize("loop", [LOOP, LOADS], ids=["loop", "loads"])


ALONE = 1e6
"""Seconds between two of a session's own looks at what to note: a test that counts what is written must be the only
writer, and a note under way would be counted as the compaction's."""


async def played(world: Running, client: Client, loop: Loop) -> None:
    """Most of the loop, compacted once on the way, ready for the compaction that matters."""
    await client.play(world.service, loop[:4])
    await compact(world)
    await client.play(world.service, loop[4:-1])
    await quiet(world)
    await world.service._compacting._note_fetched()


async def ends_as_unbroken(disk: Disk, client: Client, loop: Loop, expected: Unbroken, attempt: int) -> None:
    """The next incarnation finds everything, compacts it, and ends the loop as if nothing had happened."""
    async with running(disk, attempt=attempt, pod=f"pod-{attempt}") as world:
        await client.play(world.service, loop)
        await compact(world)
        assert (states(world.engine), client.told) == expected
        assert world.service.status().replay_mismatches == 0
        live = facts(world.service._context.history)
    assert facts(history_of(await opened_copy(disk))) == live


async def count_effects(loop: Loop) -> int:
    disk = Disk()
    files = CrashFiles(disk)
    async with running(disk, files=files, fence_interval=ALONE) as world:
        await played(world, Client(), loop)
        before = files.effects
        await world.service._compacting._compact()
        return files.effects - before


@LOOPS
@pytest.mark.parametrize("ending", ["killed", "power-lost", "holes"])
async def test_death_after_every_write_of_a_compaction(loop: Loop, ending: str) -> None:
    """Nothing that was acknowledged is lost, and nothing runs twice."""
    effects, expected = await count_effects(loop), await unbroken(loop)
    assert effects > 10
    for number in range(1, effects + 1):
        disk, client = Disk(), Client()
        files = CrashFiles(disk, after=True)
        async with running(disk, files=files, fence_interval=ALONE) as world:
            await played(world, client, loop)
            files.die_at = files.effects + number
            with pytest.raises((*Over, Died)):
                await world.service._compacting._compact()
        if ending != "killed":
            disk.lose_power(random.Random(number) if ending == "holes" else None)
        await ends_as_unbroken(disk, client, loop, expected, attempt=2)


@dataclass
class Overtaken(CrashFiles):
    """Just before one of its effects or of its readings of the fence, this process sleeps, and others act."""

    overtake_at: int = 0
    points: int = 0
    others: Callable[[], Awaitable[None]] | None = None

    def check(self) -> None:
        super().check()
        if self.others is not None:
            self.points += 1
            if self.points == self.overtake_at:
                others, self.others = self.others, None
                asyncio.run(others())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("successor", "loop"), [("serves", LOOP), ("claims", LOOP), ("compacts", LOOP), ("compacts", LOADS)]
)
async def test_a_successor_starts_at_every_point_of_a_compaction(successor: str, loop: Loop) -> None:
    """The zombie goes on afterwards: its base counts for all or for none, and it deletes nothing that is needed."""
    expected, number, fenced = await unbroken(loop), 0, 0
    while True:
        number += 1
        disk, client = Disk(), Client()
        files = Overtaken(disk, overtake_at=number)

        async def act(disk: Disk = disk, client: Client = client) -> None:
            if successor == "claims":
                claim(CrashFiles(disk), 2, "pod-2", TIME)
                return
            async with running(disk, attempt=2, pod="pod-2") as world:
                await client.play(world.service, loop)
                if successor == "compacts":
                    await compact(world)

        async with running(disk, files=files, fence_interval=ALONE) as world:
            await played(world, client, loop)
            files.others = act
            try:
                await world.service._compacting._compact()
            except Fenced:
                fenced += 1
            except StorageFailed:  # a file that the successor's own compaction has deleted
                assert successor == "compacts"
            if files.points < number:
                break  # it was through before
            with pytest.raises((Fenced, StorageFailed)):
                await world.service.accept(loop[1][0])
        await ends_as_unbroken(disk, client, loop, expected, attempt=3)
    assert number > 20
    assert fenced > 10


async def test_a_rotation_makes_the_old_file_durable_and_then_the_new_one() -> None:
    """What was not flushed before is in the seal: power loss must not take it from under it."""
    disk = Disk()
    async with running(disk) as world:
        await Client().play(world.service, LOOP[:2])
        await quiet(world)
        await asyncio.shield(world.store.journal.note(Try(A, 3, 1))[1])
        await world.store.journal.rotate()
        disk.lose_power()
        assert len(disk.files[layout.journal(1, 1)].flushed) > 200
        assert (await opened_copy(disk)).history[-1][1].__class__.__name__ == "Open"


async def test_a_zombie_rotates_no_journal() -> None:
    """The first record of the next file reads the fence like any other."""
    disk = Disk()
    async with running(disk, fence_interval=ALONE) as world:
        await Client().play(world.service, LOOP[:2])
        claim(CrashFiles(disk), 2, "pod-2", TIME)
        with pytest.raises(Fenced):
            await world.store.journal.rotate()
        async with asyncio.timeout(5):
            with pytest.raises(Fenced):
                await world.store.journal.rotate()


async def test_a_zombie_delivers_no_result_of_a_base() -> None:
    """Not even one that it had delivered before."""
    disk, client = Disk(), Client()
    async with running(disk, fence_interval=ALONE) as world:
        await client.play(world.service, LOOP)
        await compact(world)
        assert f"{A}:1" in client.told
        assert isinstance(world.service._context.history.find(f"{A}:1"), Kept)
        claim(CrashFiles(disk), 2, "pod-2", TIME)
        with pytest.raises(Fenced):
            await world.service.outcome(f"{A}:1", 0)


async def test_a_zombie_deletes_no_file_that_its_base_stands_for() -> None:
    """Only the newest incarnation deletes."""
    disk = Disk()
    async with running(disk, fence_interval=ALONE) as world:
        await Client().play(world.service, LOOP[:4])
        await quiet(world)
        base = await world.store.compactor.compact({}, {})
        before = journal_files(disk)
        claim(CrashFiles(disk), 2, "pod-2", TIME)
        with pytest.raises(Fenced):
            await world.store.compactor.replace(base)
        assert journal_files(disk) == before


async def test_a_zombie_takes_no_unfinished_base_away() -> None:
    """Not even what it wrote itself and cannot finish."""
    disk = Disk()
    files = Overtaken(disk)
    async with running(disk, files=files, fence_interval=ALONE) as world:
        await Client().play(world.service, LOOP[:4])
        await quiet(world)
        claim_at = files.effects + 5

        def full() -> None:
            if files.effects >= claim_at:
                claim(CrashFiles(disk), 2, "pod-2", TIME)
                raise OSError(28, "No space left on device")

        files.on_flush = full
        with pytest.raises(Fenced):
            await world.store.compactor.compact({}, {})
        assert any(name.endswith(".base") for name in journal_files(disk))


async def test_what_an_interrupted_compaction_left_is_swept_by_the_next() -> None:
    """Files before the base, and bases that never counted."""
    disk, client = Disk(), Client()
    files = CrashFiles(disk)
    async with running(disk, files=files) as world:
        await client.play(world.service, LOOP[:4])
        await quiet(world)
        await world.store.compactor.compact({}, {})
    files = CrashFiles(disk)
    async with running(disk, attempt=2, pod="pod-2", files=files, fence_interval=ALONE) as world:
        await client.play(world.service, LOOP)
        await quiet(world)
        await world.service._compacting._note_fetched()
        files.die_at = files.effects + 7
        with pytest.raises((*Over, Died)):
            await world.service._compacting._compact()
    assert len([name for name in journal_files(disk) if name.endswith(".base")]) == 2
    assert layout.journal(1) in disk.files
    async with running(disk, attempt=3, pod="pod-3") as world:
        await client.play(world.service, LOOP)
        await compact(world)
    assert journal_files(disk) == [layout.base(layout.Cut(3, 1)), layout.journal(3, 1), layout.journal(3, 2)]


async def damaged(disk: Disk, path: str, at: int) -> None:
    content = disk.files[path]
    content.written = content.flushed = (
        content.written[:at] + bytes([content.written[at] ^ 1]) + content.written[at + 1 :]
    )


async def test_a_corrupt_base_is_loud() -> None:
    """One flipped bit anywhere in it stops the next incarnation, which names the file."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, LOOP)
        await compact(world)
    path = next(name for name in journal_files(disk) if name.endswith(".base"))
    chance = random.Random(5)
    for _ in range(20):
        whole = disk.files[path].written
        await damaged(disk, path, chance.randrange(len(whole)))
        with pytest.raises(JournalDamaged, match=f"{path}: it is not the base"):
            await opened_copy(disk)
        disk.files[path].written = disk.files[path].flushed = whole
    await opened_copy(disk)
    del disk.files[path]
    with pytest.raises(JournalDamaged, match=f"{path}: it is not the base"):
        await opened_copy(disk)


async def test_a_corrupt_base_that_does_not_count_yet_costs_nothing() -> None:
    """Without the journal file that names it, the files before it are the history."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, LOOP)
        await quiet(world)
        await world.service._compacting._note_fetched()
        await world.store.compactor.compact({}, {})
        live = facts(world.service._context.history)
    path = next(name for name in journal_files(disk) if name.endswith(".base"))
    await damaged(disk, path, 100)
    del disk.files[layout.journal(1, 2)]
    assert facts(history_of(await opened_copy(disk))) == live


async def test_a_compaction_that_nobody_waits_for_ends() -> None:
    """Its thread must not hold up the end of the process."""
    stop = threading.Event()
    turns = _Turns(stop)
    turns()
    stop.set()
    await asyncio.sleep(2 * TURN)
    with pytest.raises(StorageFailed):
        turns()
