"""Full, over-quota, read-only and hanging storage: calls are held, the session says why, and goes on by itself."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from everloop_trainer.session.errors import StorageFailed
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded
from everloop_trainer.session.records import Open
from everloop_trainer.store.journal import JournalWriter
from everloop_trainer.store.opening import open_store
from everloop_trainer.store.places import Places
from tests.session.world import (
    LOOP,
    TIME,
    A,
    B,
    Client,
    Running,
    claimant,
    create,
    fb,
    freeze,
    load,
    optim,
    running,
    save,
    states,
    unbroken,
    until,
)
from tests.store.crash_files import CrashFiles, Disk
from tests.store.records import accept

Unbroken = tuple[dict[str, bytes], dict[str, Succeeded | Failed]]
HELD = 0.05
"""Seconds in which a held call would long have been answered."""


async def is_held(call: asyncio.Future[None]) -> bool:
    _, held = await asyncio.wait({call}, timeout=HELD)
    return bool(held)


async def ended(world: Running) -> StorageFailed:
    async with asyncio.timeout(10):
        with pytest.raises(StorageFailed) as caught:
            await world.task
    return caught.value


@pytest.mark.parametrize("torn", [0, 1, 30], ids=["nothing", "a byte", "half a record"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=["full", "quota", "read-only"])
async def test_nothing_new_is_acknowledged_and_what_was_is_served(number: int, torn: int) -> None:
    """The session stays up, holds what is new, says why, serves what it has; with space, the next boot goes on."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1, b"a1")]])
        world.files.refuse, world.files.torn = number, torn
        new = asyncio.ensure_future(world.service.accept(optim(A, 2)))
        assert await is_held(new)
        assert os.strerror(number) in world.service.status().storage_error
        assert isinstance(await client.ask(world.service, f"{A}:1"), Succeeded)
        await client.send(world.service, fb(A, 1, b"a1"))
        waiting = await world.service.outcome(f"{A}:2", 0)
        assert isinstance(waiting, Pending)
        assert waiting.reason.startswith("the storage takes no writes, nothing is lost")
        assert not world.task.done()
        world.files.refuse = None
        await ended(world)
        with pytest.raises(StorageFailed):
            await new
    async with running(disk) as world:
        assert world.service.status().storage_error == ""
        await client.play(world.service, [[fb(A, 1, b"a1"), optim(A, 2)]])
        assert world.service.status().models[0].step == 1


STORED = [save(A, 3, "kept"), freeze(A, 3, 0), load(A, 3, f"tinker://{A}/weights/first")]


@pytest.mark.parametrize("what", STORED, ids=["checkpoint", "sampler", "load"])
async def test_nothing_fails_because_its_file_finds_no_space(what: Operation) -> None:
    """The journal has room, a large file has none: it waits, however often it is tried, and others are told why."""
    files, client, refused = CrashFiles(Disk()), Client(), 0
    full, creating = False, files.create

    def create_file(path: str, data: bytes) -> None:
        nonlocal refused
        if full and path.endswith("state.safetensors"):
            refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        creating(path, data)

    files.create = create_file  # type: ignore[method-assign]
    async with running(files.disk, files=files, replay_budget=1e9) as world:
        await client.play(world.service, [[create(A), create(B)], [fb(A, 1, b"a1")], [save(A, 2, "first")]])
        full = True
        for operation in (what, fb(B, 1, b"b1")):
            await client.send(world.service, operation)
        await until(lambda: refused > 20)
        assert "No space left" in world.service.status().storage_error
        for request in (what.request_id, f"{B}:1"):
            waiting = await world.service.outcome(request, 0)
            assert isinstance(waiting, Pending)
            assert waiting.reason.startswith("the storage takes no writes, nothing is lost")
        full = False
        assert isinstance(await client.ask(world.service, what.request_id), Succeeded)
        assert isinstance(await client.ask(world.service, f"{B}:1"), Succeeded)
        assert world.service.status().storage_error == ""
        assert len(world.source.engines) == 1


async def test_storage_that_fills_at_each_write_of_a_loop() -> None:
    """Whichever write finds no space, the loop ends as the unbroken one, and its client saw no failure of ours."""
    expected = await unbroken(LOOP)
    counted = CrashFiles(Disk())
    async with running(counted.disk, files=counted) as world:
        await Client().play(world.service, LOOP)
        await world.settled()
    async with running(Disk()) as world:
        opened = world.files.effects
    for full_at in range(opened + 1, counted.effects, 3):
        await fill_up_at(full_at, expected)


async def fill_up_at(full_at: int, expected: Unbroken) -> None:
    disk, client = Disk(), Client()
    files = CrashFiles(disk, full_at=full_at, torn=full_at % 40)
    async with running(disk, files=files) as world:
        playing = asyncio.ensure_future(client.play(world.service, LOOP))
        await until(lambda: files.refuse is not None or playing.done())
        await asyncio.sleep(0.01)
        files.full_at = None
        await asyncio.sleep(0)
        files.refuse = None
        await asyncio.wait({playing, world.task}, return_when=asyncio.FIRST_COMPLETED)
        playing.cancel()
        outcome = (await asyncio.gather(playing, return_exceptions=True))[0]
        assert outcome is None or isinstance(outcome, StorageFailed | asyncio.CancelledError)
    async with running(disk) as world:
        await client.play(world.service, LOOP)
        await world.settled()
        assert (states(world.engine), client.told) == expected


async def test_a_server_that_starts_on_full_storage_waits_for_space() -> None:
    """Its claim holds, but it opens no journal before there is space; then the next boot serves."""
    disk = Disk()
    files = CrashFiles(disk, full_at=5, torn=20)
    opening = asyncio.ensure_future(open_store(files, claimant(), TIME, probe_interval=0.005))
    _, waiting = await asyncio.wait({opening}, timeout=HELD)
    assert waiting
    files.full_at = files.refuse = None
    with pytest.raises(StorageFailed, match="No space left"):
        await opening
    async with running(disk) as world:
        assert world.service.status().incarnation.number == 2


async def test_a_failed_disk_is_final_at_once() -> None:
    """EIO is no lack of space: nothing is waited for."""
    async with running(Disk()) as world:
        await Client().play(world.service, [[create(A)]])
        world.files.refuse = errno.EIO
        with pytest.raises(StorageFailed):
            await world.service.accept(fb(A, 1))
        await ended(world)


@asynccontextmanager
async def hanging(slow: float) -> AsyncIterator[tuple[JournalWriter, threading.Event]]:
    files, go = CrashFiles(Disk()), threading.Event()
    files.on_flush = go.wait  # type: ignore[assignment]
    journal = JournalWriter(files, Open(1, 1, 1, "pod-1", (), TIME), Places(), slow=slow)
    try:
        yield journal, go
    finally:
        go.set()
        await journal.close()


async def test_hanging_storage_shows() -> None:
    """A write that takes long is told of while it lasts, and acknowledges when it ends."""
    async with hanging(slow=0.01) as (journal, go):
        _, durable = journal.append(accept(1))
        await until(lambda: "has been under way for" in journal.trouble)
        assert not durable.done()
        go.set()
        await durable
        assert journal.trouble == ""
