"""What a pod that is stopped has copied before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from everloop_trainer.session.errors import Fenced
from tests.session.told import Told
from tests.session.world import A, Client, Serving, create, fb, optim, running, running_on, save, until
from tests.store.crash_files import CrashFiles, Disk

LONG = 3600.0


@asynccontextmanager
async def stopped(disk: Disk, copy_seconds: float) -> AsyncIterator[tuple[Serving[CrashFiles], Told]]:
    """A session with a checkpoint, and no snapshot before it is drained."""
    told = Told()
    async with running_on(CrashFiles(disk), copies=told, replay_budget=1e9) as world:
        await Client().play(world.service, [[create(A)], [save(A, 1, "half")], [fb(A, 2, b"a2"), optim(A, 3)]])
        await world.settled()
        await world.service.drain(10, copy_seconds)
        yield world, told


async def test_snapshots_of_the_end_are_copied_and_waited_for() -> None:
    """They are written first; then the session is over once there is a copy of them."""
    async with stopped(Disk(), LONG) as (world, told):
        await until(lambda: told.finishing)
        assert [state.kind for state in told.states] == ["weights", "snapshots"]
        assert not world.task.done()
        told.done.set()
        await asyncio.wait_for(world.task, 10)


async def test_the_time_that_the_pod_has_is_kept() -> None:
    """Copies that take longer are left to the next pod."""
    async with stopped(Disk(), 0.05) as (world, told):
        await asyncio.wait_for(world.task, 10)
        assert not told.done.is_set()


async def test_a_newer_incarnation_ends_it() -> None:
    """It makes the copies from then on; nobody waits for the old pod."""
    disk = Disk()
    async with stopped(disk, LONG) as (world, told):
        await until(lambda: told.finishing)
        async with running(disk, attempt=2, pod="pod-2"):
            with pytest.raises(Fenced):
                await asyncio.wait_for(world.task, 10)
