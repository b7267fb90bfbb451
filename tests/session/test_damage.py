"""Stored bytes that are not what they were, met while the session serves: one stream stops loudly, the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from everloop_trainer.session.errors import Fenced
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.outcomes import Failed, Outcome, Pending, Succeeded, Unknown
from everloop_trainer.session.service import SessionService
from everloop_trainer.store import layout
from tests.session.fake_engine import FakeEngine
from tests.session.world import (
    PATIENCE,
    SAMPLER,
    A,
    B,
    C,
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
from tests.store.crash_files import Disk

DEATHS = 7
"""More than an operation outlives in which engines die."""


@contextmanager
def damaged(disk: Disk, path: str, what: bytes) -> Iterator[None]:
    """One bit of the file is another as long as the block lasts."""
    content = disk.files[path]
    assert content.written.count(what) == 1
    place = content.written.index(what)

    def flip() -> None:
        written = bytearray(content.written)
        written[place] ^= 1
        content.written = bytes(written)

    flip()
    yield
    flip()


def journal(disk: Disk) -> str:
    """The path of the only journal file."""
    (path,) = [path for path in disk.files if path.startswith("journal/")]
    return path


def stopped(world: Running, stream: str, path: str) -> bool:
    """Whether /status says that this stream is stopped, and names the file."""
    parts = world.service.status().storage_error.split("; ")
    return any(f"{stream} is stopped: " in part and f"{path}: the record at offset" in part for part in parts)


async def waits(service: SessionService, request: str, path: str) -> None:
    """The answer is held as long as the client lets it be, and says what is wrong."""
    asking: asyncio.Task[Outcome | Pending | Unknown] = asyncio.create_task(service.outcome(request, 1e9))
    await until(lambda: asking.done() or path in service.status().storage_error)
    answer = await service.outcome(request, 0)
    assert isinstance(answer, Pending)
    assert answer.queue_state == "paused_capacity"
    assert f"is stopped until its storage is mended: {path}: the record at offset" in answer.reason
    assert not asking.done(), "a client that is answered at once asks again at once"
    asking.cancel()


async def test_a_damaged_result_stops_its_model_alone() -> None:
    """It is never told otherwise than it was recorded: once the bytes are right again it is as it was."""
    disk, client = Disk(), Client()
    async with running(disk, replay_budget=1e9) as world:
        service, path = world.service, journal(disk)
        await client.play(service, [[create(A), create(B)], [fb(A, 1, b"a1")]])
        told = client.told[f"{A}:1"]
        assert isinstance(told, Succeeded)
        with damaged(disk, path, told.body):
            await waits(service, f"{A}:1", path)
            await service.accept(optim(A, 2))
            await waits(service, f"{A}:2", path)
            assert stopped(world, A, path)
            assert [run.broken for run in service.runs()] == [True, False]
            await client.play(service, [[fb(B, 1, b"b1"), optim(B, 2)]])
            assert not stopped(world, B, path)
            world.engine.die()
            await until(lambda: len(service.status().recoveries) == 1)
            assert stopped(world, A, path)
            assert service.status().recoveries[0].lost_operations == 1
        assert await client.ask(service, f"{A}:1") == told
        world.engine.die()
        await client.play(service, [[optim(A, 2)]])
        assert service.status().storage_error == ""
        assert states(world.engine)[A] == (await unbroken([[create(A)], [fb(A, 1, b"a1")], [optim(A, 2)]]))[0][A]


async def test_a_damaged_request_stops_its_model_alone() -> None:
    """It is not run, no engine is said to have died in it, and once mended it runs as it was sent."""
    disk, client = Disk(), Client()
    async with running(disk, replay_budget=1e9) as world:
        service, path = world.service, journal(disk)
        await client.play(service, [[create(A), create(B)]])
        await service.accept(optim(A, 2))
        world.source.available = False
        world.engine.die()
        await until(lambda: service.status().engine_pid is None)
        await service.accept(fb(A, 1, b"request a1"))
        with damaged(disk, path, b"request a1"):
            world.source.available = True
            await waits(service, f"{A}:1", path)
            assert stopped(world, A, path)
            await client.play(service, [[fb(B, 1, b"b1"), optim(B, 2)]])
            for death in range(2, DEATHS):
                world.engine.die()
                await until(lambda: len(service.status().recoveries) == death)  # noqa: B023
                await until(lambda: stopped(world, A, path))
        world.engine.die()
        await client.play(service, [[fb(A, 1, b"request a1"), optim(A, 2)], [fb(B, 3, b"b3"), optim(B, 4)]])
        assert service.status().storage_error == ""
        loop = [[create(A), create(B)], [fb(A, 1, b"request a1"), optim(A, 2)]]
        loop += [[fb(B, 1, b"b1"), optim(B, 2)], [fb(B, 3, b"b3"), optim(B, 4)]]
        assert states(world.engine) == (await unbroken(loop))[0]


async def test_a_damaged_sample_stops_its_sampler_until_the_next_engine() -> None:
    """A sampling session has nothing to be restored from: its next engine tries again what waits."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        service, path = world.service, journal(disk)
        first = await client.ask_after(service, sample(SAMPLER, 0, None))
        assert isinstance(first, Succeeded)
        with damaged(disk, path, first.body):
            await waits(service, f"{SAMPLER}:0", path)
            await service.accept(sample(SAMPLER, 1, None, seed=6))
            await waits(service, f"{SAMPLER}:1", path)
            assert stopped(world, SAMPLER, path)
        world.engine.die()
        assert isinstance(await client.ask(service, f"{SAMPLER}:1"), Succeeded)
        assert await client.ask(service, f"{SAMPLER}:0") == first
        assert service.status().storage_error == ""


async def test_a_session_that_ends_does_not_hold_who_asks_for_a_damaged_result() -> None:
    """They are sent to the next incarnation at once."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1, b"a1")]])
        told = client.told[f"{A}:1"]
        assert isinstance(told, Succeeded)
        with damaged(disk, journal(disk), told.body):
            asking = asyncio.create_task(world.service.outcome(f"{A}:1", 1e9))
            await until(lambda: stopped(world, A, journal(disk)))
        async with running(disk, attempt=2, pod="pod-2"):
            with pytest.raises(Fenced):
                await asyncio.wait_for(asking, PATIENCE)


LEARN = [[create(A), create(B)], [fb(A, 1, b"a1"), optim(A, 2), fb(B, 1, b"b1"), optim(B, 2)], [save(A, 3, "half")]]
LEARNT = sum(map(len, LEARN))
BETWEEN = [[save(B, 3, "other")]]
GO_ON = [[fb(A, 4, b"a4"), optim(A, 5), fb(B, 4, b"b4"), optim(B, 5)]]
PATH = f"tinker://{A}/weights/half"


HALF = f"{layout.state(storage_id(A), 'weights', '1-3')}/{layout.STATE}"


@pytest.mark.parametrize("harm", ["damaged", "missing"])
async def test_a_load_of_a_damaged_checkpoint_is_a_users_error(harm: str) -> None:
    """Pinned, and harmed the moment before it is read: the load fails, names it, and no model has other weights."""
    disk, client = Disk(), Client()

    def hook(_: FakeEngine, op: str) -> None:
        if op != "load":
            return
        if harm == "missing":
            disk.files.pop(HALF, None)
        else:
            disk.files[HALF].written += b" "

    async with running(disk, hook=hook) as world:
        await client.play(world.service, LEARN)
        await client.play(world.service, [[load(C, 0, PATH), load(B, 3, PATH, optimizer=False), fb(C, 1)]])
        for request in (f"{C}:0", f"{B}:3"):
            refused = client.told[request]
            assert isinstance(refused, Failed)
            assert refused.category == "user"
            assert refused.error.startswith(f"path: the storage does not hold '{PATH}' as it was saved: ")
        orphan = client.told[f"{C}:1"]
        assert isinstance(orphan, Failed)
        assert PATH in orphan.error
        await client.play(world.service, GO_ON)
        assert states(world.engine) == (await unbroken([*LEARN, *BETWEEN, *GO_ON]))[0]
        assert world.service.status().storage_error == ""


async def test_a_load_that_has_been_read_is_not_harmed_by_damage() -> None:
    """The source is damaged between the reading and the load's own snapshot: what was read is what was pinned."""
    disk, client = Disk(), Client()

    def hook(_: FakeEngine, op: str) -> None:
        if op == "write" and len(client.told) >= LEARNT:
            disk.files[HALF].written += b" "

    loads = [[load(C, 0, PATH)], [fb(C, 1, b"c1"), optim(C, 2)]]
    async with running(disk, hook=hook) as world:
        await client.play(world.service, [*LEARN, loads[0]])
        assert disk.files[HALF].written.endswith(b" ")
        world.engine.die()
        await client.play(world.service, [loads[1]])
        assert states(world.engine) == (await unbroken([*LEARN, *loads]))[0]
