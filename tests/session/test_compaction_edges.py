"""Compaction looked at as an adversary would: what one base leaves, the next one must still find."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from typing import IO

import pytest

from everloop_trainer.session.compacting import WHAT
from everloop_trainer.session.gaps import MINUTES
from everloop_trainer.session.history import Kept
from everloop_trainer.session.operations import CreateModel, Operation, SaveWeightsForSampler
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded
from everloop_trainer.session.retention import KEPT
from everloop_trainer.store import layout
from everloop_trainer.store.compacting import Limits
from tests.session.compacted import compact, facts, history_of, journal_files, opened_copy, quiet
from tests.session.fake_engine import FakeEngine
from tests.session.test_gaps import wait
from tests.session.world import (
    SAMPLER,
    A,
    B,
    Client,
    Running,
    create,
    fb,
    load,
    optim,
    running,
    sample,
    save,
    states,
    unbroken,
    until,
)
from tests.store.crash_files import CrashFiles, Died, Disk

PATIENCE = MINUTES * 60.0


async def steps(client: Client, world: Running, first: int, last: int) -> None:
    """Whole steps with numbers from `first` on, a snapshot after each."""
    for seq in range(first, last, 2):
        await client.play(world.service, [[fb(A, seq, b"x%d" % seq), optim(A, seq + 1)]])
        await quiet(world)


@pytest.mark.parametrize("early", [0, 3], ids=["window", "floor"])
async def test_a_number_given_up_outlasts_two_compactions(early: int) -> None:
    """The record of a lost number is copied once and copied again: a late arrival is told the same for ever."""
    disk, client = Disk(), Client()
    async with running(disk, fence_interval=0.001) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1, b"a1")]])
        await client.send(world.service, optim(A, 4))
        await wait(world, PATIENCE + 3 * 20, f"{A}:4")
        await client.ask(world.service, f"{A}:4")
        for late in (fb(A, 2, b"a2"), fb(A, 3, b"a3")):
            assert isinstance(await client.ask_after(world.service, late), Failed)
        await steps(client, world, 5, 5 + 2 * early)
        await compact(world)
        await steps(client, world, 5 + 2 * early, 15 + 2 * early)
        await compact(world)
        for request, outcome in client.told.items():
            assert await world.service.outcome(request, 0) == outcome
        live = facts(world.service._context.history)
    assert facts(history_of(await opened_copy(disk))) == live


async def test_a_failure_that_was_answered_with_pending_is_not_fetched() -> None:
    """Storage was slow when the client asked for a failure, and it was told nothing: the result is owed for ever."""
    disk, client = Disk(), Client()
    files = CrashFiles(disk)
    async with running(disk, files=files, fence_interval=1e6) as world:
        await client.play(world.service, [[create(A)]])
        await world.service.accept(fb(A, 1, b"bad"))  # the client looks at nothing that it sent itself
        await quiet(world)
        release, flush = threading.Event(), files.flushes

        def slow() -> None:
            if files.flushes > flush:
                release.wait(20)

        files.on_flush = slow
        assert isinstance(await world.service.outcome(f"{A}:1", 0), Pending)
        files.on_flush = None
        release.set()
        await client.play(world.service, [[optim(A, 2)]])
        await steps(client, world, 3, 15)
        await world.service._compacting._note_fetched()
        world.clock.now += 2 * KEPT
        await compact(world)
        outcome = await world.service.outcome(f"{A}:1", 0)
        assert isinstance(outcome, Failed)
        assert "target_tokens: bad" in outcome.error, "nobody has ever been told of it"


async def test_one_corrupt_snapshot_is_survived_after_compaction() -> None:
    """A load's snapshot that does not count yet takes no older snapshot's place: the base needs two that serve."""
    disk, client = Disk(), Client()
    files, go = CrashFiles(disk), threading.Event()

    def never() -> None:
        go.wait(20)
        raise Died("killed before this flush")

    def hold_results(engine: FakeEngine, call: str) -> None:
        if call == "restore" and files.hanging:
            files.on_flush = never

    async with running(disk, files=files, hook=hold_results) as world:
        await client.play(world.service, [[create(A)]])
        await steps(client, world, 1, 7)
        await client.play(world.service, [[save(A, 7, "half")]])
        await compact(world)
        assert world.service._context.history.streams[A].floor == 4, "snapshots 4 and 6 are what there is"
        files.hanging = "snapshots/1-9"
        await client.play(world.service, [[fb(A, 8, b"x8"), optim(A, 9)]])
        await world.service.accept(load(A, 10, f"tinker://{A}/weights/half"))
        await until(lambda: any(name.endswith("snapshots/1-10/manifest.json") for name in disk.files))
        files.thaw()
        await until(lambda: any(name.endswith("snapshots/1-9/manifest.json") for name in disk.files))
        await until(lambda: not any("snapshots/1-4/" in name for name in disk.files))
        files.kill()
        go.set()
    disk.lose_power()
    newest = next(name for name in disk.files if name.endswith("snapshots/1-9/state.safetensors"))
    disk.files[newest].written = disk.files[newest].flushed = b"torn"
    async with running(disk, attempt=2, pod="pod-2") as world:
        await until(lambda: world.service.status().state == "Serving")
        assert world.service.status().storage_error == ""
        await client.ask_after(world.service, load(A, 10, f"tinker://{A}/weights/half"))


@dataclass
class Unreadable(CrashFiles):
    """Reading one file gives an input/output error, in this process but not in its engine."""

    bad: str = "nothing"

    def open_read(self, path: str) -> IO[bytes]:
        if self.bad in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().open_read(path)


@pytest.mark.parametrize("bad", ["manifest.json", "journal/00000001.log"])
async def test_what_cannot_be_read_costs_the_compaction_and_not_the_session(bad: str) -> None:
    """As damage does: the session has all facts in memory; another model than the broken one trains on."""
    disk, client = Disk(), Client()
    files = Unreadable(disk)
    async with running(disk, files=files) as world:
        await client.play(world.service, [[create(A), create(B)], [fb(B, 1), optim(B, 2)]])
        await steps(client, world, 1, 7)
        files.bad = bad
        await compact(world)  # what it raises ends the session
        assert "Input/output error" in world.service.status().storage_error
        files.bad = "nothing"
        assert isinstance(await client.ask_after(world.service, fb(B, 3, b"more")), Succeeded)


@pytest.mark.parametrize(
    "metadata",
    [{"a": float("nan"), "b": float("inf"), "c": -0.0, "d": 1e400, "e": 2**70, "f": "\U0001f600\x00", "g": [{}]}],
)
async def test_any_metadata_outlasts_a_compaction(metadata: dict[str, object]) -> None:
    """Bit for bit, whatever JSON can hold."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[Operation(A, 0, CreateModel("smol", 4, 7, True, True, True, metadata))]])
        await steps(client, world, 1, 7)
        await compact(world)
        assert repr(history_of(await opened_copy(disk)).models[A].info.user_metadata) == repr(metadata)
        assert world.service.status().storage_error == ""


async def test_metadata_of_any_accepted_depth_can_be_compacted() -> None:
    """What a journal can hold, a base can hold."""
    for depth in range(150, 210):
        disk, client, metadata = Disk(), Client(), dict[str, object]()
        for _ in range(depth):
            metadata = {"a": metadata}
        async with running(disk) as world:
            created = Operation(A, 0, CreateModel("smol", 4, 7, True, True, True, metadata))
            if isinstance(await client.ask_after(world.service, created), Failed):
                return
            await steps(client, world, 1, 7)
            await compact(world)
            assert world.service.status().storage_error == "", depth


async def test_operations_that_change_nothing_do_not_stay() -> None:
    """An evaluation of many forward calls after the last step: no replay needs them, only their results are owed."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)]])
        await steps(client, world, 1, 9)
        await client.play(world.service, [[fb(A, seq, b"x", forward_only=True)] for seq in range(9, 209)])
        await compact(world)
        assert len(world.service._context.history.streams[A].entries) < 50


async def test_a_number_written_otherwise_is_answered_alike_before_and_after() -> None:
    """Leading zeros name the same operation; a client's odd request id is no damage of the journal."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)]])
        await steps(client, world, 1, 15)
        before = await world.service.outcome(f"{A}:001", 0)
        await compact(world)
        assert await world.service.outcome(f"{A}:1", 0) == before
        assert await world.service.outcome(f"{A}:001", 0) == before


async def test_an_open_window_reaches_back_behind_the_snapshots() -> None:
    """Steps that were refused leave the window open, and snapshots are taken at them: all that matters of it stays."""
    disk, client = Disk(), Client()
    loop = [[create(A)], *([fb(A, seq, b"x%d" % seq), optim(A, seq + 1, -1.0)] for seq in range(1, 11, 2))]
    loop.append([fb(A, 11, b"bad")])
    end = [[fb(A, 12, b"x12"), optim(A, 13)], [fb(A, 14, b"x14"), optim(A, 15)]]
    async with running(disk) as world:
        for step in loop:
            await client.play(world.service, [step])
            await quiet(world)
        await compact(world)
        stream = world.service._context.history.streams[A]
        assert stream.floor > 4
        assert {1, 2, 3, 4} <= set(stream.entries)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, [*loop, *end])
        await world.settled()
        assert (states(world.engine), client.told) == await unbroken([*loop, *end])


async def test_a_damaged_result_of_a_base_stops_its_model_only() -> None:
    """It stays pending and is named; another model trains on."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A), create(B)], [fb(B, 1), optim(B, 2)]])
        await steps(client, world, 1, 15)
        await compact(world)
        kept = world.service._context.history.find(f"{A}:1")
        assert isinstance(kept, Kept)
        content = disk.files[kept.base]
        content.written = content.flushed = (
            content.written[: kept.offset] + b"\0" * 8 + content.written[kept.offset + 8 :]
        )
        assert isinstance(await world.service.outcome(f"{A}:1", 0), Pending)
        assert f"{kept.base}: the record at offset {kept.offset} is broken" in world.service.status().storage_error
        assert isinstance(await client.ask_after(world.service, fb(B, 3, b"more")), Succeeded)


async def test_an_inflight_sampler_follows_its_model_after_a_compaction() -> None:
    """Its weights are those of the newest inflight save, told by a base or by the records behind it."""
    disk, client = Disk(), Client()

    def inflight(seq: int, sampler: int) -> Operation:
        return Operation(A, seq, SaveWeightsForSampler(None, sampler, "inflight"))

    loop = [[create(A)], *([fb(A, seq, b"x%d" % seq), optim(A, seq + 1)] for seq in range(1, 9, 2))]
    loop += [[inflight(9, 0)], [sample(SAMPLER, 0)], [fb(A, 10), optim(A, 11)], [inflight(12, 1)]]
    end = [[sample(SAMPLER, 1)]]
    async with running(disk) as world:
        await client.play(world.service, loop)
        await compact(world)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, [*loop, *end])
        await world.settled()
        assert (states(world.engine), client.told) == await unbroken([*loop, *end])


async def test_an_abandoned_compaction_is_tried_again_soon_and_then_less_often() -> None:
    """What was due stays due: after one minute, then after two, until one goes well."""
    disk, client = Disk(), Client()

    def tries() -> int:
        return sum(name.startswith("journal/00000001-") for name in journal_files(disk))

    async with running(disk, fence_interval=0.001, limits=Limits(1 << 30, 20)) as world:

        async def looked() -> None:
            looks = world.clock.looks
            await until(lambda: world.clock.looks > looks + 100)

        await client.play(world.service, [[create(A)]])
        content, right, wrong = disk.files[layout.journal(1)], b'"k":"create', b'"k":"cReate'
        content.written = content.written.replace(right, wrong)
        await steps(client, world, 1, 21)
        errors = world.service._context.storage_errors
        for number, minutes in enumerate((0, 1, 2)):
            for _ in range(minutes):
                await looked()
                assert tries() == number
                world.clock.now += 60.0
            await until(lambda: WHAT in errors)
            assert "damaged at offset" in errors.pop(WHAT)
        content.written = content.written.replace(wrong, right)
        world.clock.now += 240.0
        await until(lambda: layout.journal(1) not in disk.files)
        await until(lambda: world.service.status().storage_error == "")
