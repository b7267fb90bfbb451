"""Numbers that never arrive: given up after six minutes in which they could have arrived, and not earlier."""

from __future__ import annotations

import json
from functools import partial

import pytest

from everloop_trainer.session.gaps import AT_ONCE, MINUTES, QUIET
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded
from tests.session.world import A, B, Client, Over, Running, create, fb, optim, running, states, until
from tests.store.crash_files import CrashFiles, Died, Disk

PATIENCE = MINUTES * 60.0
STEP = 20.0
at = partial(running, fence_interval=0.001)
TAIL: list[list[Operation]] = [[fb(A, 5, b"a5"), optim(A, 6)]]


async def wait(world: Running, seconds: float, polled: str | None) -> None:
    """Let time go by in steps in which gaps are looked for; a client polls, or nobody does."""
    for _ in range(int(seconds / STEP)):
        world.clock.now += STEP
        if polled is not None:
            await world.service.outcome(polled, 0)
        seen = world.clock.looks

        def looked(seen: int = seen) -> bool:
            if world.task.done():
                world.task.result()
            return world.clock.looks > seen + 2

        await until(looked)


async def open_gap(world: Running, client: Client) -> None:
    """Numbers 2 and 3 of the model are missing, and an optim_step waits behind them."""
    await client.play(world.service, [[create(A)], [fb(A, 1, b"a1")]])
    await client.send(world.service, optim(A, 4))


async def test_the_stream_goes_on_without_what_never_arrived() -> None:
    """The step behind a gap fails with its window; a late arrival gets a user error; the next window is whole."""
    client = Client()
    async with at(Disk()) as world:
        await open_gap(world, client)
        await wait(world, PATIENCE - STEP, f"{A}:4")
        pending = await world.service.outcome(f"{A}:4", 0)
        assert isinstance(pending, Pending)
        assert "operation 2 of this model, which has not arrived" in pending.reason
        await wait(world, 3 * STEP, f"{A}:4")
        step = await client.ask(world.service, f"{A}:4")
        assert isinstance(step, Failed)
        assert "operation 2 of this accumulation window failed" in step.error
        for late in (fb(A, 2, b"a2"), fb(A, 3, b"a3")):
            outcome = await client.ask_after(world.service, late)
            assert isinstance(outcome, Failed)
            assert (outcome.category, f"operation {late.seq} did not arrive" in outcome.error) == ("user", True)
        await client.play(world.service, TAIL)
        assert json.loads(states(world.engine)[A])["applied"] == [6]


async def test_a_gap_that_closes_in_time_costs_nothing() -> None:
    """What arrives after five minutes runs in its place; the clock of the next gap starts from there."""
    client = Client()
    async with at(Disk()) as world:
        await open_gap(world, client)
        await wait(world, PATIENCE - 60, f"{A}:4")
        await client.send(world.service, fb(A, 2, b"a2"))
        await until(lambda: world.service.status().models[0].seq == 2)
        await wait(world, PATIENCE - 60, f"{A}:4")
        await client.send(world.service, fb(A, 3, b"a3"))
        assert isinstance(await client.ask(world.service, f"{A}:4"), Succeeded)


async def test_time_in_which_nobody_was_heard_does_not_count() -> None:
    """While the gateway is away nothing can arrive: an hour of that gives nothing up."""
    client = Client()
    async with at(Disk()) as world:
        await open_gap(world, client)
        await wait(world, 10 * PATIENCE, None)
        assert isinstance(await world.service.outcome(f"{A}:4", 0), Pending)
        await wait(world, PATIENCE - STEP - QUIET, f"{A}:4")
        assert isinstance(await world.service.outcome(f"{A}:4", 0), Pending)


async def test_the_clock_starts_anew_after_a_restart() -> None:
    """Five minutes before and five minutes after a restart are not ten; what was given up stays given up."""
    disk, client = Disk(), Client()
    for attempt in (1, 2):
        async with at(disk, attempt=attempt, pod=f"p{attempt}") as world:
            await open_gap(world, client)
            await wait(world, PATIENCE - 60, f"{A}:4")
            assert isinstance(await world.service.outcome(f"{A}:4", 0), Pending)
    async with at(disk, attempt=3, pod="p3") as world:
        await wait(world, PATIENCE + 2 * STEP, f"{A}:4")
        await client.ask(world.service, f"{A}:4")
        await client.ask_after(world.service, fb(A, 2))
    async with at(disk, attempt=4, pod="p4") as world:
        await client.ask(world.service, f"{A}:4")
        await client.ask(world.service, f"{A}:2")
        await client.play(world.service, TAIL)
        assert json.loads(states(world.engine)[A])["applied"] == [6]


async def test_a_model_whose_creation_never_arrived() -> None:
    """Its creation is given up like any other number; what waited for it ends as a user error."""
    client = Client()
    async with at(Disk()) as world:
        await client.send(world.service, fb(B, 1))
        await wait(world, PATIENCE + 2 * STEP, f"{B}:1")
        outcome = await client.ask(world.service, f"{B}:1")
        assert isinstance(outcome, Failed)
        assert "operation 0 did not arrive" in outcome.error


async def test_a_gap_as_wide_as_the_numbers_go() -> None:
    """An absurd number is accepted and waits; giving up what lies before it stays cheap."""
    client, far = Client(), optim(A, 2**62)
    async with at(Disk()) as world:
        await client.play(world.service, [[create(A)]])
        await client.send(world.service, far)
        await wait(world, PATIENCE + 2 * STEP, far.request_id)
        await until(lambda: world.service.status().models[0].seq == AT_ONCE)
        assert isinstance(await world.service.outcome(far.request_id, 0), Pending)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
async def test_death_at_every_write_around_a_gap(power: bool) -> None:
    """Whatever write the server dies at: the number is given up once, or is still awaited, and never both."""
    effects = 0
    for die_at in range(1, 200):
        disk, client = Disk(), Client()
        files = CrashFiles(disk, die_at=die_at, after=True)
        try:
            async with at(disk, files=files) as world:
                await open_gap(world, client)
                await give_up(world, client)
        except (*Over, Died):
            pass
        if power:
            disk.lose_power()
        async with at(disk, attempt=2, pod="p2") as world:
            await open_gap(world, client)
            await give_up(world, client)
            await client.play(world.service, TAIL)
            await world.settled()
            assert json.loads(states(world.engine)[A])["applied"] == [6]
        effects = die_at
        if files.effects < die_at:
            break
    assert 15 < effects < 199


async def give_up(world: Running, client: Client) -> None:
    """Poll for as long as it takes until the gap is given up; then its numbers arrive late."""
    while isinstance(await world.service.outcome(f"{A}:4", 0), Pending):
        await wait(world, PATIENCE + 2 * STEP, f"{A}:4")
    await client.ask(world.service, f"{A}:4")
    for late in (fb(A, 2), fb(A, 3)):
        assert isinstance(await client.ask_after(world.service, late), Failed)
