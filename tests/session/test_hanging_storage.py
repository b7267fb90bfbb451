"""Storage that does not answer: nothing false is acknowledged, the rest goes on, the status tells, and it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from everloop_trainer.session.outcomes import Pending, Succeeded
from everloop_trainer.session.underway import SLOW
from everloop_trainer.store.opening import open_store
from tests.session.world import TIME, A, B, Client, Running, claimant, create, fb, optim, running, save, until
from tests.store.crash_files import CrashFiles, Disk

PATIENCE = 60.0
HELD = 0.05
"""Seconds in which a held call would long have been answered."""


@asynccontextmanager
async def hanging(where: str, disk: Disk | None = None) -> AsyncIterator[tuple[Running, Client]]:
    """A session with two models, on storage that hangs wherever a path holds `where`."""
    client, files = Client(), CrashFiles(disk or Disk(), hanging=where)
    async with asyncio.timeout(PATIENCE), running(files.disk, files=files) as world:
        try:
            await client.play(world.service, [[create(A), create(B)]])
            yield world, client
        finally:
            files.thaw()


async def told_of(world: Running, words: str) -> None:
    """The status says nothing while it may be a slow file, and names what hangs after that."""
    assert world.service.status().storage_error == ""
    world.clock.now += SLOW + 1
    error = world.service.status().storage_error
    assert error.startswith(words), error
    assert "has been under way for" in error


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
async def test_a_snapshot_that_hangs_delays_nobody(file: str) -> None:
    """Both models go on by many steps; it is told of; and it is stored, as any other, once the storage answers."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # what hangs must not use it up
    async with hanging(f"-2/{file}") as (world, client):
        await client.play(world.service, [[fb(A, 1), optim(A, 2)]])
        for seq in range(1, 20, 2):
            await client.play(world.service, [[fb(A, seq + 2), optim(A, seq + 3), fb(B, seq), optim(B, seq + 1)]])
        await told_of(world, f"the snapshot of {A}")
        assert not any(name.endswith(f"-2/{file}") for name in world.files.disk.files)
        world.files.thaw()
        await until(lambda: any(name.endswith("-2/manifest.json") for name in world.files.disk.files))
        await until(lambda: world.service.status().storage_error == "")
        await client.play(world.service, [[fb(A, 23), optim(A, 24)]])
        await until(lambda: any(name.endswith("-24/manifest.json") for name in world.files.disk.files))


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
async def test_a_checkpoint_that_hangs_is_not_told_of_as_saved(file: str) -> None:
    """Its operation waits and another model's calls are accepted; after a thaw, or after a restart, both end once."""
    disk = Disk()
    for thawed in (False, True):
        async with hanging(f"weights/{1 + thawed}-1/{file}", disk) as (world, client):
            await client.send(world.service, save(A, 1, "kept"))
            await until(lambda: world.service.status().models[0].pending == 1)
            await asyncio.wait_for(client.send(world.service, fb(B, 1)), 10)
            assert isinstance(await world.service.outcome(f"{A}:1", HELD), Pending)
            await told_of(world, f"the checkpoint of {A}:1")
            if thawed:
                world.files.thaw()
                assert isinstance(await client.ask(world.service, f"{A}:1"), Succeeded)
                assert isinstance(await client.ask(world.service, f"{B}:1"), Succeeded)
                assert world.service.status().storage_error == ""
    assert sum(name.endswith("manifest.json") and "/weights/" in name for name in disk.files) == 1


async def test_a_fence_that_cannot_be_read_holds_every_answer() -> None:
    """Neither accepted nor told, as nobody knows whether this incarnation counts; the status answers meanwhile."""
    async with hanging("nothing") as (world, client):
        await client.play(world.service, [[fb(A, 1)]])
        world.files.hanging = "epochs/"
        held = [
            asyncio.ensure_future(world.service.accept(fb(A, 2))),
            asyncio.ensure_future(world.service.accept(fb(A, 1))),
            asyncio.ensure_future(world.service.outcome(f"{A}:1", 10)),
        ]
        answered, _ = await asyncio.wait(held, timeout=HELD)
        assert not answered

        def told() -> bool:
            world.clock.now += SLOW + 1
            return "the reading of the fence has been under way" in world.service.status().storage_error

        await until(told)
        world.files.thaw()
        await asyncio.wait_for(asyncio.gather(*held), 10)
        await until(lambda: world.service.status().storage_error == "")
        assert isinstance(await client.ask(world.service, f"{A}:2"), Succeeded)


async def test_a_claim_that_hangs_serves_nobody_until_it_is_written() -> None:
    """The new incarnation waits, and the old one goes on as the newest."""
    async with hanging("nothing") as (world, client):
        files = CrashFiles(world.files.disk, hanging="epochs/00000002")
        opening = asyncio.ensure_future(open_store(files, claimant(2, "pod-2"), TIME))
        waiting, _ = await asyncio.wait({opening}, timeout=HELD)
        assert not waiting
        await client.play(world.service, [[fb(A, 1)]])
        files.thaw()
        store = await opening
        assert store.incarnation.number == 2
        await store.journal.close()
