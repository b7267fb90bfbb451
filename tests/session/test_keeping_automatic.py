"""Automatic checkpoints that users remove, or whose names they take."""

from __future__ import annotations

import asyncio

from everloop_trainer.session.outcomes import Succeeded
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Pruned, Record
from tests.session.kept import HOUR, keys, listed, stored
from tests.session.world import A, B, Client, create, fb, load, optim, running, save, until
from tests.store.crash_files import Disk


async def test_an_automatic_one_can_be_removed() -> None:
    """It does not come back, and those that are kept are counted without it."""
    client = Client()
    async with running(Disk(), checkpoint_every=0.001) as world:
        steps = [[fb(A, 2 * n - 1), optim(A, 2 * n)] for n in range(1, 6)]
        await client.play(world.service, [[create(A)], *steps[:3]])
        auto = f"tinker://{A}/weights/auto-"
        await until(lambda: set(listed(world.service)) == {f"{auto}2", f"{auto}3"})
        await world.service.keeping.remove(f"{auto}3", "r1")
        await world.service.keeping.expire_after(f"{auto}2", HOUR, "r2")
        assert listed(world.service) == {f"{auto}2": "2030-01-01T01:00:00.000Z"}
        await client.play(world.service, steps[3:])
        await until(lambda: set(listed(world.service)) == {f"{auto}4", f"{auto}5"})
        await until(lambda: stored(world) == keys(world))


async def test_an_automatic_one_may_be_removed_while_others_are_pruned() -> None:
    """It is superseded too, and gone when it is its turn."""
    disk, client, removals = Disk(), Client(), list[asyncio.Task[None]]()
    steps = [[fb(A, 2 * n - 1), optim(A, 2 * n)] for n in range(1, 6)]
    async with running(disk, checkpoint_every=0.001, checkpoint_keep=3) as world:
        await client.play(world.service, [[create(A)], *steps[:4]])
        await until(lambda: len(listed(world.service)) == 3)
    async with running(disk, attempt=2, pod="pod-2", checkpoint_every=0.001, checkpoint_keep=2) as world:
        appending = world.store.journal.append

        def append(record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
            if isinstance(record, Pruned) and not removals:
                removal = world.service.keeping.remove(f"tinker://{A}/weights/auto-3", "r1")
                removals.append(asyncio.create_task(removal))
            return appending(record, body)

        world.store.journal.append = append  # type: ignore[method-assign]
        await client.play(world.service, steps[4:])
        await until(lambda: stored(world) == keys(world) and len(keys(world)) == 2)
        await removals[0]


async def test_an_automatic_one_that_is_to_be_loaded_keeps_its_file() -> None:
    """Removed, of an earlier incarnation, and swept around: the load that was accepted before finds it."""
    disk, client = Disk(), Client()
    steps = [[fb(A, 2 * n - 1), optim(A, 2 * n)] for n in range(1, 5)]
    loading = load(B, 2, f"tinker://{A}/weights/auto-2", optimizer=False)
    async with running(disk, checkpoint_every=0.001) as world:
        await client.play(world.service, [[create(A), create(B)], *steps[:3]])
        await until(lambda: len(listed(world.service)) == 2)
    async with running(disk, attempt=2, pod="pod-2", checkpoint_every=0.001) as world:
        await client.send(world.service, loading)  # it waits for the number before it
        await world.service.keeping.remove(f"tinker://{A}/weights/auto-2", "r1")
        await client.play(world.service, steps[3:])
        assert isinstance(await client.ask_after(world.service, fb(B, 1)), Succeeded)
        assert isinstance(await client.ask(world.service, loading.request_id), Succeeded)
        await until(lambda: stored(world) == keys(world))


async def test_an_automatic_one_that_lost_its_name_is_pruned_with_its_kind() -> None:
    """A save of the user's took the name: the file stays until it is superseded, and goes then."""
    client = Client()
    steps = [[fb(A, 2 * n - 1), optim(A, 2 * n)] for n in range(1, 4)]
    async with running(Disk(), checkpoint_every=0.001) as world:
        await client.play(world.service, [[create(A)], *steps])
        await until(lambda: len(listed(world.service)) == 2)
        await client.ask_after(world.service, save(A, 7, "auto-3"))
        looks = world.clock.looks
        await until(lambda: world.clock.looks > looks + 20)
        assert len(stored(world)) == 3
        await client.play(world.service, [[fb(A, 8), optim(A, 9)], [fb(A, 10), optim(A, 11)]])
        await until(lambda: len(keys(world)) == 3 and stored(world) == keys(world))
