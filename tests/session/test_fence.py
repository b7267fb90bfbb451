"""A zombie whose storage was claimed by another pod lets nothing out: each effect reads the fence itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from everloop_trainer.session.errors import Fenced
from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.store.epochs import claim
from tests.session.world import SAMPLER, TIME, A, Client, Running, create, fb, freeze, running, sample
from tests.store.crash_files import CrashFiles, Disk

UNAWARE = 1e6


@asynccontextmanager
async def zombie(fence_interval: float = UNAWARE) -> AsyncIterator[Running]:
    """A session with a result and a failure that were delivered, and a newer incarnation beside it."""
    disk, client = Disk(), Client()
    async with running(disk, fence_interval=fence_interval) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1, b"a1"), fb(A, 2, b"bad")]])
        assert isinstance(client.told[f"{A}:1"], Succeeded)
        assert isinstance(client.told[f"{A}:2"], Failed)
        claim(CrashFiles(disk), 2, "pod-2", TIME)
        yield world


async def test_a_zombie_acknowledges_no_repeat() -> None:
    """The newer incarnation may not know the number."""
    async with zombie() as world:
        with pytest.raises(Fenced):
            await world.service.accept(fb(A, 1, b"a1"))


async def test_a_zombie_acknowledges_nothing_new() -> None:
    """Nobody will ever run it."""
    async with zombie() as world:
        with pytest.raises(Fenced):
            await world.service.accept(fb(A, 3, b"a3"))


async def test_a_zombie_calls_nothing_unknown() -> None:
    """The newer incarnation may have accepted it meanwhile."""
    async with zombie() as world:
        with pytest.raises(Fenced):
            await world.service.outcome(f"{A}:3", 0)


async def test_a_zombie_delivers_no_result() -> None:
    """Not even one that it had delivered before."""
    async with zombie() as world:
        with pytest.raises(Fenced):
            await world.service.outcome(f"{A}:1", 0)


async def test_a_zombie_delivers_no_failure_again() -> None:
    """Its delivery is journaled already, so that no append reads the fence."""
    async with zombie() as world:
        with pytest.raises(Fenced):
            await world.service.outcome(f"{A}:2", 0)


async def test_a_zombie_says_of_no_sample_that_it_is_cancelled_or_unknown() -> None:
    """The newer incarnation may have accepted it, and have its result."""
    async with zombie() as world:
        with pytest.raises(Fenced):
            await world.service.cancel(f"{SAMPLER}:0")


async def test_a_zombie_calls_no_samples_of_a_client_unknown() -> None:
    """The newer incarnation may have accepted some meanwhile."""
    async with zombie() as world:
        with pytest.raises(Fenced):
            await world.service.completions(SAMPLER, 0, 0, 0)


async def test_a_zombie_tells_no_samples_of_a_client() -> None:
    """Not even one that it had told before."""
    disk, client = Disk(), Client()
    async with running(disk, fence_interval=UNAWARE) as world:
        await client.play(world.service, [[create(A)], [freeze(A, 1, 0)], [sample(SAMPLER, 0)]])
        assert await world.service.completions(SAMPLER, 0, 0, 0)
        claim(CrashFiles(disk), 2, "pod-2", TIME)
        with pytest.raises(Fenced):
            await world.service.completions(SAMPLER, 0, 0, 0)


async def test_an_idle_zombie_ends() -> None:
    """With nothing to do it notices all the same, and stops."""
    async with zombie(fence_interval=0.01) as world, asyncio.timeout(3):
        with pytest.raises(Fenced):
            await world.task
