"""A compacted history says the same in less space, and goes on as the whole one would."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from dataclasses import dataclass, field
from typing import IO

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from everloop_trainer.session.history import History
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Record
from everloop_trainer.session.recovery import matters
from everloop_trainer.session.retention import KEPT
from everloop_trainer.session.service import FORGOTTEN, SessionService
from everloop_trainer.store import layout
from everloop_trainer.store.compacting import Limits
from tests.session.compacted import (
    compact,
    facts,
    history_of,
    journal_files,
    known_numbers,
    opened_copy,
    quiet,
)
from tests.session.test_random import SEED, Fault, build, disorder, disturbed, faults, reference, steps
from tests.session.world import (
    LOADS,
    LOOP,
    SAMPLER,
    A,
    Client,
    create,
    fb,
    optim,
    running,
    sample,
    states,
    unbroken,
    until,
)
from tests.store.crash_files import CrashFiles, Disk

ALWAYS = Limits(1, 1)
"""A compaction is due whenever anything was journaled."""
OFTEN = 0.01
properties = settings(
    max_examples=60,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def says_the_same(short: History, whole: History) -> None:
    """The compacted history differs from the whole one only in operations that nobody runs or restores again."""
    left, all_ = facts(short), facts(whole)
    for name in ("models", "checkpoints", "frozen", "samplers", "last_request", "inflight"):
        assert left[name] == all_[name], name
        assert list(left[name]) == list(all_[name]), f"order of {name}"
    assert list(short.streams) == list(whole.streams)
    for name, stream in short.streams.items():
        complete = whole.streams[name]
        assert (stream.done, stream.fetched) == (complete.done, complete.fetched)
        assert list(stream.pending.items()) == list(complete.pending.items())
        assert known_numbers(stream) == sorted(complete.entries)
        assert all(entry == complete.entries[seq] for seq, entry in stream.entries.items())
        replayed = {entry.seq for entry in complete.finished() if entry.seq >= stream.floor and matters(entry)}
        assert not stream.ordered or replayed <= set(stream.entries)


async def compacted_at(loop: list[list[Operation]], points: set[int], chance: random.Random) -> None:
    """Play a loop and compact after some of its steps; look at what the next incarnation would find after each."""
    adapters, undisturbed = await reference(loop)
    disk, client = Disk(), Client()
    records: list[tuple[Position, Record]] = []
    end = Position(0, 0)
    async with running(disk, checkpoint_every=OFTEN, fence_interval=1e6) as world:  # nothing is noted beside this
        for number, step in enumerate(disorder(loop, chance)):
            await client.play(world.service, [step])
            if number not in points:
                continue
            await quiet(world)
            await world.service._compacting._note_fetched()
            records += [found for found in (await opened_copy(disk)).history if found[0] > end]
            end = records[-1][0]
            await compact(world)
            whole = History()
            for position, record in records:
                whole.apply(record, position)
            live = world.service._context.history
            says_the_same(live, whole)
            assert facts(history_of(await opened_copy(disk))) == facts(live)
            for request, outcome in client.told.items():
                assert await world.service.outcome(request, 0) == outcome
    async with running(disk, attempt=2, pod="pod-2", checkpoint_every=OFTEN) as world:
        await client.play(world.service, disorder(loop, chance))
        await world.settled()
        assert (states(world.engine), client.told) == (adapters, undisturbed.told)
        assert world.service.status().replay_mismatches == 0


@seed(SEED)
@properties
@given(plan=steps, points=st.sets(st.integers(0, 6)), luck=st.integers(0, 1 << 30))
def test_any_history_compacted_anywhere(plan: list[list[tuple[str, str]]], points: set[int], luck: int) -> None:
    """It opens to the same facts, in memory and from disk; what was told is told again; the loop goes on the same."""
    note(f"hypothesis seed {SEED}, luck {luck}")
    asyncio.run(compacted_at(build(plan), points, random.Random(luck)))


@seed(SEED)
@properties
@given(plan=steps, ends=st.lists(faults, max_size=3), luck=st.integers(0, 1 << 30))
def test_any_loop_under_any_faults_while_it_is_compacted(
    plan: list[list[tuple[str, str]]], ends: list[Fault], luck: int
) -> None:
    """Compaction all the time, in the middle of everything, and processes that die or live on as zombies."""
    note(f"hypothesis seed {SEED}, luck {luck}")
    asyncio.run(disturbed(build(plan), ends, random.Random(luck), ALWAYS))


@pytest.mark.parametrize("loop", [LOOP, LOADS], ids=["loop", "loads"])
async def test_a_session_compacts_by_itself(loop: list[list[Operation]]) -> None:
    """When there is enough of it; the files before the base go, and the loop notices nothing."""
    disk, client = Disk(), Client()
    async with running(disk, limits=ALWAYS) as world:
        await client.play(world.service, loop)
        await until(lambda: layout.journal(1) not in disk.files)
        await until(lambda: sum(name.endswith(".base") for name in journal_files(disk)) == 1)
        await world.settled()
        assert (states(world.engine), client.told) == await unbroken(loop)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, loop)
        await world.settled()
        assert (states(world.engine), client.told) == await unbroken(loop)


async def long_loop(client: Client, disk: Disk) -> None:
    """A hundred steps, compacted at the end."""
    async with running(disk, replay_budget=0.0) as world:
        await client.play(world.service, [[create(A)]])
        for seq in range(1, 200, 2):
            await client.play(world.service, [[fb(A, seq, b"x" * 1000), optim(A, seq + 1)]])
        await compact(world)


async def test_what_no_replay_needs_is_left_out() -> None:
    """Requests and tries of operations before the snapshots go, results stay."""
    disk, client = Disk(), Client()
    await long_loop(client, disk)
    store = await opened_copy(disk)
    history = history_of(store)
    assert len(history.streams[A].entries) < 10
    assert len(history.streams[A].owed.numbers) > 190
    assert store.base is not None
    assert len(store.history) < 10
    assert sum(len(disk.files[name].written) for name in journal_files(disk)) < 100 * 1000


async def test_a_model_without_two_whole_snapshots_keeps_its_history() -> None:
    """Should one not be readable another must serve: until there are two, all can be replayed from the start."""
    disk, client, steps_ = Disk(), Client(), [[create(A)], [fb(A, 1, b"a1"), optim(A, 2)], [fb(A, 3), optim(A, 4)]]

    def whole() -> int:
        return sum("/snapshots/" in name and name.endswith(layout.MANIFEST) for name in list(disk.files))

    async with running(disk) as world:
        await client.play(world.service, steps_[:2])
        await until(lambda: whole() == 1)  # a boundary that comes while one is written takes no other
        await client.play(world.service, steps_[2:])
        await until(lambda: whole() == 2)
        await quiet(world)
        snapshots = await world.service._context.states.snapshots(A)
        assert [snapshot.seq for snapshot in snapshots] == [4, 2]
        path = f"{world.service._context.states.path('snapshots', A, snapshots[1].key).removeprefix('/disk/')}"
        disk.files[path].written = disk.files[path].flushed = b"torn"
        await compact(world)
        assert sorted(world.service._context.history.streams[A].entries) == [0, 1, 2, 3, 4]
    for name in [name for name in disk.files if "/snapshots/" in name]:
        del disk.files[name]
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, steps_)
        await world.settled()
        assert (states(world.engine), client.told) == await unbroken(steps_)


async def test_the_older_snapshot_serves_after_compaction() -> None:
    """The newest one turns out to be torn; everything since the one before it can be replayed."""
    disk, client = Disk(), Client()
    await long_loop(client, disk)
    newest = max((name for name in disk.files if "/snapshots/" in name), key=lambda name: int(name.split("/")[3][2:]))
    path = f"{newest.rpartition('/')[0]}/{layout.STATE}"
    disk.files[path].written = disk.files[path].flushed = b"torn"
    async with running(disk, attempt=2, pod="pod-2") as world:
        await world.settled()
        assert world.service.status().recoveries[0].replayed_operations > 0
        await client.ask_after(world.service, fb(A, 201, b"more"))
        assert world.service.status().replay_mismatches == 0


async def test_a_model_whose_snapshots_are_all_gone_is_broken_and_not_begun_anew() -> None:
    """What was compacted cannot be replayed: never silently with less."""
    disk, client = Disk(), Client()
    await long_loop(client, disk)
    for name in [name for name in disk.files if "/snapshots/" in name]:
        del disk.files[name]
    async with running(disk, attempt=2, pod="pod-2") as world:
        await until(lambda: world.service.status().state == "Serving")
        assert "no way to restore it was left" in world.service.status().storage_error


async def test_results_are_forgotten_a_day_after_they_were_fetched() -> None:
    """Not earlier; a repeat is answered as finished, and nothing runs again, in this incarnation and in the next."""
    disk, client = Disk(), Client()
    loop = [[create(A)], [fb(A, 1, b"a1"), fb(A, 2, b"bad"), optim(A, 3)], [fb(A, 4, b"a4"), optim(A, 5)]]
    loop += [[sample(SAMPLER, 0, None)], [fb(A, 6, b"a6"), optim(A, 7)]]
    async with running(disk) as world:
        await client.play(world.service, loop)
        world.clock.now += KEPT - 60
        await compact(world)
        assert {await world.service.outcome(request, 0) for request in client.told} == set(client.told.values())
        world.clock.now += 120
        await compact(world)
        gone = [f"{A}:1", f"{A}:2", f"{SAMPLER}:0"]
        await forgotten(world.service, gone)
        kept = await world.service.outcome(f"{A}:7", 0)
        assert kept == client.told[f"{A}:7"], "the last one is needed still"
    async with running(disk, attempt=2, pod="pod-2") as world:
        await world.settled()
        await forgotten(world.service, gone)
        calls = len(world.engine.calls)
        for operation in (fb(A, 1, b"a1"), fb(A, 2, b"other"), sample(SAMPLER, 0, None)):
            await world.service.accept(operation)
        await world.settled()
        assert len(world.engine.calls) == calls, "nothing ran"
        await forgotten(world.service, gone)
        assert isinstance(await client.ask_after(world.service, fb(A, 8, b"a8")), Succeeded)


async def forgotten(service: SessionService, requests: list[str]) -> None:
    """Assert that these results are told to be gone."""
    for request in requests:
        assert await service.outcome(request, 0) == Failed(FORGOTTEN, "user"), request


async def test_results_that_nobody_fetched_are_kept() -> None:
    """However long it takes; and a day counts anew after a restart."""
    disk, client = Disk(), Client()
    loop = [[create(A)], [fb(A, 1, b"a1"), optim(A, 2)], [fb(A, 3, b"a3"), optim(A, 4)], [fb(A, 5), optim(A, 6)]]
    async with running(disk) as world:
        for step in loop:
            for operation in step:
                await world.service.accept(operation)
            await quiet(world)
        assert isinstance(await client.ask(world.service, f"{A}:1"), Succeeded)
        await compact(world)
        world.clock.now += 3 * KEPT / 4
    async with running(disk, attempt=2, pod="pod-2") as world:
        world.clock.now += 3 * KEPT / 4
        await compact(world)
        assert isinstance(await world.service.outcome(f"{A}:1", 0), Succeeded)
    async with running(disk, attempt=3, pod="pod-3") as world:
        world.clock.now += 2 * KEPT
        await compact(world)
        assert await world.service.outcome(f"{A}:1", 0) == Failed(FORGOTTEN, "user")
        assert isinstance(await world.service.outcome(f"{A}:2", 0), Succeeded)


@dataclass
class SlowReader(CrashFiles):
    """Holds the next reading of one file open."""

    held: str = ""
    started: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def open_read(self, path: str) -> IO[bytes]:
        if path == self.held:
            self.held = ""
            self.started.set()
            assert self.go.wait(20)
        return super().open_read(path)


async def test_a_result_that_moves_while_it_is_read_is_found_again() -> None:
    """First from the journal to a base, then from that one to the next."""
    disk, client = Disk(), Client()
    files = SlowReader(disk)
    async with running(disk, files=files) as world:
        await client.play(world.service, LOOP)
        for _ in range(2):
            files.held = journal_files(disk)[0]
            files.started.clear()
            files.go.clear()
            asked = asyncio.ensure_future(world.service.outcome(f"{A}:1", 0))
            await asyncio.to_thread(files.started.wait, 20)
            await compact(world)
            files.go.set()
            assert await asked == client.told[f"{A}:1"]


async def test_full_storage_costs_the_compaction_and_nothing_else() -> None:
    """The unfinished base goes, the session serves on and says why, and the next compaction does its work."""
    disk, client = Disk(), Client()
    files = CrashFiles(disk)
    async with running(disk, files=files) as world:
        await client.play(world.service, LOOP[:4])
        await quiet(world)
        await world.service._compacting._note_fetched()
        files.full_at = files.effects + 6  # the journal has gone on in a new file; the base gets its first bytes
        await compact(world)
        files.full_at, files.refuse = None, None
        assert os_error(errno.ENOSPC) in world.service.status().storage_error
        assert not any(name.endswith(".base") for name in journal_files(disk))
        await client.play(world.service, LOOP)
        await compact(world)
        assert layout.journal(1) not in disk.files
        await world.settled()
        assert (states(world.engine), client.told) == await unbroken(LOOP)


def os_error(number: int) -> str:
    """How the error shows."""
    return f"[Errno {number}]"


async def test_damage_that_a_compaction_finds_stops_it_and_keeps_every_file() -> None:
    """The session has all facts in memory and serves on; nothing is deleted that a person may need."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, LOOP)
        await quiet(world)
        content = disk.files[layout.journal(1)]
        content.written = content.written.replace(b'"t":"result"', b'"t":"resulT"', 1)
        before = journal_files(disk)
        await compact(world)
        assert f"{layout.journal(1)}: damaged at offset" in world.service.status().storage_error
        assert set(before) <= set(journal_files(disk))
        assert isinstance(await client.ask_after(world.service, fb(A, 11, b"more")), Succeeded)
