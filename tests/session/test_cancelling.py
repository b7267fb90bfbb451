"""Cancelling a sample: it ends as failed, once, whatever else would end it and whatever dies; all else stays."""

from __future__ import annotations

import asyncio

import pytest

from everloop_trainer.session.execution import CANCELLED
from everloop_trainer.session.outcomes import Failed, Succeeded, Unknown
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Fetched, Record, Result
from tests.session.fake_engine import FakeEngine
from tests.session.test_sampling import START, expected, results, send_samples
from tests.session.world import PATIENCE, SAMPLER, A, Client, Running, fb, running, sample, until
from tests.store.crash_files import Disk

OVER = Failed(CANCELLED, "user")


async def sampling(world: Running, count: int) -> None:
    """Wait until so many samples are in the engine."""
    await until(lambda: sum(call[0] == "sample" for call in world.engine.calls) == count)


async def test_a_cancelled_sample_leaves_the_engine_and_the_others_go_on() -> None:
    """It is told to have failed, also to the next incarnation; a repeat changes nothing."""
    disk, client, alone = Disk(), Client(), await expected(4)
    async with running(disk) as world:
        await client.play(world.service, START)
        gate = world.engine.gate = asyncio.Event()
        await send_samples(client, world, 4)
        await sampling(world, 4)
        assert await world.service.cancel(f"{SAMPLER}:1")
        assert await client.ask(world.service, f"{SAMPLER}:1") == OVER
        await until(lambda: f"{SAMPLER}:1" not in world.service._runner.sampling)
        assert await world.service.cancel(f"{SAMPLER}:1")
        gate.set()
        found = [await client.ask(world.service, f"{SAMPLER}:{seq}") for seq in range(4)]
        assert found == [alone[0], OVER, *alone[2:]]
        work = dict(world.service.status().work.ended)
        assert (work["sample", True], work["sample", False]) == (3, 1)
        assert isinstance(await client.ask_after(world.service, fb(A, 4, b"a4")), Succeeded)
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert [await client.ask(world.service, f"{SAMPLER}:{seq}") for seq in range(4)] == found
        assert {results(world)[SAMPLER, seq] for seq in range(4)} == {1}


async def test_what_has_ended_stays_and_what_waits_ends_at_once() -> None:
    """No engine is needed for it; nobody's sample is unknown, and an operation of a model is left alone."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, START)
        done = await client.ask_after(world.service, sample(SAMPLER, 0))
        assert await world.service.cancel(f"{SAMPLER}:0")
        assert await client.ask(world.service, f"{SAMPLER}:0") == done
    async with running(disk, attempt=2, pod="pod-2", available=False) as world:
        await client.send(world.service, sample(SAMPLER, 1))
        await client.send(world.service, fb(A, 4, b"a4"))
        for request in (f"{SAMPLER}:1", f"{A}:4"):
            assert await world.service.cancel(request)
        assert await client.ask(world.service, f"{SAMPLER}:1") == OVER
        for request in (f"{SAMPLER}:2", "nothing"):
            assert not await world.service.cancel(request)
            assert isinstance(await world.service.outcome(request, 0), Unknown)
        world.source.available = True
        assert isinstance(await client.ask(world.service, f"{A}:4"), Succeeded)
        assert not [call for call in world.engine.calls if call[0] == "sample"]


async def test_the_result_of_a_cancelled_sample_is_kept_no_longer_than_a_fetched_one() -> None:
    """Nobody asks for it any more, and so it would be kept as long as the session."""
    client, noted = Client(), list[Fetched]()
    async with running(Disk()) as world:
        await client.play(world.service, START)
        note = world.store.journal.note

        def noting(record: Record) -> tuple[Position, asyncio.Future[None]]:
            if isinstance(record, Fetched) and record.stream == SAMPLER:
                noted.append(record)
            return note(record)

        world.store.journal.note = noting  # type: ignore[method-assign]
        world.engine.gate = asyncio.Event()
        await send_samples(client, world, 2)
        assert await world.service.cancel(f"{SAMPLER}:1")
        await until(lambda: bool(noted))
        assert noted == [Fetched(SAMPLER, ((1, 2),))]


async def test_a_sample_that_ends_while_it_is_cancelled_ends_once() -> None:
    """Its result is being written: that is what counts."""
    disk, client, alone = Disk(), Client(), await expected(1)
    cancelling: list[asyncio.Task[bool]] = []
    async with running(disk) as world:
        await client.play(world.service, START)
        append = world.store.journal.append

        def cancelled(record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
            if isinstance(record, Result) and record.stream == SAMPLER:
                cancelling.append(asyncio.create_task(world.service.cancel(f"{SAMPLER}:0")))
            return append(record, body)

        world.store.journal.append = cancelled  # type: ignore[method-assign]
        await client.send(world.service, sample(SAMPLER, 0, seed=0))
        assert [await client.ask(world.service, f"{SAMPLER}:0")] == alone
        assert [await each for each in cancelling] == [True]
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert results(world)[SAMPLER, 0] == 1


async def test_a_caller_who_goes_away_leaves_nothing_half_done() -> None:
    """The record is on its way, and the sample's end takes effect; others who ask the same wait for it too."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, START)
        world.engine.gate = asyncio.Event()
        await send_samples(client, world, 1)
        await sampling(world, 1)
        first, second = (asyncio.create_task(world.service.cancel(f"{SAMPLER}:0")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second
        assert await client.ask(world.service, f"{SAMPLER}:0") == OVER
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert results(world)[SAMPLER, 0] == 1


@pytest.mark.parametrize("steps", range(0, 12, 3))
async def test_a_crash_in_between_does_no_harm(steps: int) -> None:
    """The server is killed so many steps of its loop later: the sample is cancelled or sampled, and ends once."""
    disk, client, alone = Disk(), Client(), await expected(2)
    async with running(disk) as world:
        await client.play(world.service, START)
        world.engine.gate = asyncio.Event()
        await send_samples(client, world, 2)
        await sampling(world, 2)
        cancelling = asyncio.create_task(world.service.cancel(f"{SAMPLER}:1"))
        for _ in range(steps):
            await asyncio.sleep(0)
        acknowledged = cancelling.done()
        world.files.kill()
        cancelling.cancel()
        await asyncio.wait([cancelling])
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert await client.ask(world.service, f"{SAMPLER}:0") == alone[0]
        found = await client.ask(world.service, f"{SAMPLER}:1")
        assert found in ((OVER,) if acknowledged else (OVER, alone[1]))
    async with running(disk, attempt=3, pod="pod-3") as world:
        assert {results(world)[SAMPLER, seq] for seq in range(2)} == {1}


async def test_a_sample_that_runs_alone_can_be_cancelled() -> None:
    """Engines died in it, and the last one is not asked any more how it ends."""

    def hook(engine: FakeEngine, op: str) -> None:
        if op == "sample" and len(world.source.engines) <= 3:
            engine.die()
        elif op == "sample" and len(world.source.engines) == 4:
            engine.gate = gate

    disk, client, gate = Disk(), Client(), asyncio.Event()
    async with running(disk, hook=hook) as world:
        await client.play(world.service, START)
        await send_samples(client, world, 1)
        await until(lambda: len(world.source.engines) > 3 and ("sample", "", -1) in world.engine.calls)
        assert await world.service.cancel(f"{SAMPLER}:0")
        assert await client.ask(world.service, f"{SAMPLER}:0") == OVER
        gate.set()
        await world.settled()
        assert isinstance(await client.ask_after(world.service, sample(SAMPLER, 1)), Succeeded)
        assert await asyncio.wait_for(client.ask_after(world.service, fb(A, 4, b"a4")), PATIENCE)
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert results(world)[SAMPLER, 0] == 1
