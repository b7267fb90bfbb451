"""Samples beside each other and beside training: many in the engine at once, each with one result, whatever dies."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from everloop_trainer.session.operations import Operation, Sample
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Record, Result
from everloop_trainer.session.runner import MOST_SAMPLES
from tests.session.compacted import compact
from tests.session.fake_engine import FakeEngine, sampled
from tests.session.world import SAMPLER, A, Client, Running, create, fb, freeze, optim, running, sample, until
from tests.store.crash_files import Disk

START = [[create(A)], [fb(A, 1, b"a1"), optim(A, 2)], [freeze(A, 3, 0)]]


def results(world: Running) -> Counter[tuple[str, int]]:
    """How many results each operation has in the history that a later incarnation reads."""
    return Counter((record.stream, record.seq) for _, record in world.store.history if isinstance(record, Result))


async def expected(count: int) -> list[Succeeded | Failed]:
    """What so many samples are when they come one after another."""
    client = Client()
    async with running(Disk()) as world:
        await client.play(world.service, START)
        return [await client.ask_after(world.service, sample(SAMPLER, seq, seed=seq)) for seq in range(count)]


async def send_samples(client: Client, world: Running, count: int) -> None:
    await asyncio.gather(*(client.send(world.service, sample(SAMPLER, seq, seed=seq)) for seq in range(count)))


async def test_samples_are_in_the_engine_at_once_and_training_goes_on_beside_them() -> None:
    """Up to a limit; the status tells of the oldest, each is told to run, and the session is not idle."""
    client, alone = Client(), await expected(MOST_SAMPLES + 3)
    async with running(Disk()) as world:
        await client.play(world.service, START)
        gate = world.engine.gate = asyncio.Event()
        await send_samples(client, world, MOST_SAMPLES + 3)
        await until(lambda: sum(call[0] == "sample" for call in world.engine.calls) == MOST_SAMPLES)
        told = await world.service.outcome(f"{SAMPLER}:{MOST_SAMPLES - 1}", 0)
        assert isinstance(told, Pending)
        assert told.reason == "running"
        underway = world.service.status().underway
        assert underway is not None
        assert underway.operation == f"{SAMPLER}:0"
        assert world.service.status().idle_seconds == 0
        await client.send(world.service, fb(A, 4, b"a4"))
        await until(lambda: ("forward_backward", A, 4) in world.engine.calls)
        assert sum(call[0] == "sample" for call in world.engine.calls) == MOST_SAMPLES
        gate.set()
        found = [await client.ask(world.service, f"{SAMPLER}:{seq}") for seq in range(MOST_SAMPLES + 3)]
        assert found == alone
        assert isinstance(await client.ask(world.service, f"{A}:4"), Succeeded)


@pytest.mark.parametrize("victim", ["engine", "server"])
async def test_what_was_under_way_is_sampled_again_and_told_once(victim: str) -> None:
    """Also where some have their results already: those are kept."""
    disk, client, alone = Disk(), Client(), await expected(8)
    async with running(disk) as world:
        await client.play(world.service, START)
        await client.play(world.service, [[sample(SAMPLER, seq, seed=seq) for seq in range(3)]])
        gate = world.engine.gate = asyncio.Event()
        await send_samples(client, world, 8)
        await until(lambda: len([call for call in world.engine.calls if call[0] == "sample"]) == 3 + 5)
        if victim == "engine":
            first = world.engine
            first.die()
            await until(lambda: world.engine is not first)
            found = [await client.ask(world.service, f"{SAMPLER}:{seq}") for seq in range(8)]
            assert found == alone
        gate.set()
    async with running(disk, attempt=2, pod="pod-2") as world:
        found = [await client.ask(world.service, f"{SAMPLER}:{seq}") for seq in range(8)]
        assert found == alone
    async with running(disk, attempt=3, pod="pod-3") as world:
        assert {results(world)[SAMPLER, seq] for seq in range(8)} == {1}


@pytest.mark.parametrize("victim", ["engine", "server"])
async def test_a_prompt_with_images_is_what_was_sent_whoever_samples_it(victim: str) -> None:
    """It is journaled as a body, which the next engine is given, also out of a compacted journal."""
    args = Sample((), 1, 4, 1.0, 1.0, -1, None, 5, None, prompt_in_body=True)
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await until(lambda: bool(world.source.engines))
        first = world.engine
        first.gate = asyncio.Event()
        await client.send(world.service, Operation(SAMPLER, 0, args, b"text and an image"))
        await until(lambda: any(call[0] == "sample" for call in first.calls))
        if victim == "engine":
            first.die()
            await until(lambda: world.engine is not first)
            await client.ask(world.service, f"{SAMPLER}:0")
        else:
            await compact(world)
    async with running(disk, attempt=2, pod="pod-2") as world:
        found = await client.ask(world.service, f"{SAMPLER}:0")
        assert isinstance(found, Succeeded)
        assert found.body == sampled(b"base", args, b"text and an image")


async def test_a_result_that_is_being_written_when_the_engine_dies_comes_once() -> None:
    """The sample has left the engine, its record is on its way to the disk: nothing of it is done again."""
    disk, client, alone = Disk(), Client(), await expected(6)
    async with running(disk) as world:
        await client.play(world.service, START)
        journal, append = world.store.journal, world.store.journal.append

        def dying(record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
            if isinstance(record, Result) and record.stream == SAMPLER:
                world.engine.die()
            return append(record, body)

        journal.append = dying  # type: ignore[method-assign]
        await send_samples(client, world, 6)
        assert [await client.ask(world.service, f"{SAMPLER}:{seq}") for seq in range(6)] == alone
        assert len(world.source.engines) > 1
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert {results(world)[SAMPLER, seq] for seq in range(6)} == {1}


async def test_a_defect_in_a_sample_ends_the_session_loudly() -> None:
    """What nobody foresaw must not leave a session that looks well and answers nothing."""

    def hook(_engine: FakeEngine, op: str) -> None:
        if op == "sample":
            raise ArithmeticError("a defect")

    client = Client()
    async with running(Disk(), hook=hook) as world:
        await client.play(world.service, START)
        await client.send(world.service, sample(SAMPLER, 0))
        await asyncio.wait({world.task}, timeout=10)
        with pytest.raises(ArithmeticError, match="a defect"):
            world.task.result()


async def test_a_deadly_sample_takes_nobody_along() -> None:
    """Those beside it are suspected with it, run alone, and pass; it fails."""

    def hook(engine: FakeEngine, op: str) -> None:
        if op == "sample" and engine.calls[-1][0] == "sample" and deadly_runs(world):
            engine.die()

    def deadly_runs(world: Running) -> bool:
        under_way = {*world.service._runner.sampling}
        if world.service._runner.running is not None:
            under_way.add(world.service._runner.running.request_id)
        return f"{SAMPLER}:2" in under_way

    client, alone = Client(), await expected(6)
    async with running(Disk(), hook=hook) as world:
        await client.play(world.service, START)
        await send_samples(client, world, 6)
        found = [await client.ask(world.service, f"{SAMPLER}:{seq}") for seq in range(6)]
        assert isinstance(found[2], Failed)
        assert found[2].error.startswith("sample: the training engine, or its whole pod, died each time")
        assert [each for seq, each in enumerate(found) if seq != 2] == [
            each for seq, each in enumerate(alone) if seq != 2
        ]


async def test_an_orderly_end_waits_for_what_is_under_way() -> None:
    """No try is left without a result: the next incarnation does not take it for a death."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, START)
        gate = world.engine.gate = asyncio.Event()
        await send_samples(client, world, 4)
        await until(lambda: sum(call[0] == "sample" for call in world.engine.calls) == 4)
        draining = asyncio.create_task(world.service.drain(10))
        await asyncio.sleep(0)
        assert not draining.done()
        gate.set()
        await draining
    async with running(disk, attempt=2, pod="pod-2", available=False) as world:
        assert {results(world)[SAMPLER, seq] for seq in range(4)} == {1}


async def test_seconds_beside_each_other_count_once() -> None:
    """Of samples that share the engine, the time in which it worked is told, not the sum of theirs."""
    client = Client()
    async with running(Disk()) as world:
        await client.play(world.service, START)
        before = world.service.status().work.useful_seconds
        began = world.clock.now
        gate = world.engine.gate = asyncio.Event()
        await send_samples(client, world, 20)
        await until(lambda: sum(call[0] == "sample" for call in world.engine.calls) == 20)
        world.clock.now += 100
        gate.set()
        for seq in range(20):
            await client.ask(world.service, f"{SAMPLER}:{seq}")
        useful = world.service.status().work.useful_seconds - before
        assert 100 <= useful <= world.clock.now - began
