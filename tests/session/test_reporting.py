"""What the status tells of use: since when nobody has called, and which operation is under way."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from everloop_trainer.session.status import UnderwayStatus
from tests.session.fake_engine import FakeEngine
from tests.session.world import A, Client, Running, create, fb, running, save, until
from tests.store.crash_files import CrashFiles, Disk


def hangs_in_forward_backward(engine: FakeEngine, op: str) -> None:
    if op == "forward_backward":
        engine.gate = asyncio.Event()


async def hang(world: Running) -> None:
    """A forward_backward that does not end."""
    client = Client()
    await client.play(world.service, [[create(A)]])
    await client.send(world.service, fb(A, 1))
    await until(lambda: world.engine.gate is not None)


async def test_use_starts_idleness_anew() -> None:
    """Submits, polls and questions are use; reading the status is none, nor is waiting for a number that never came."""
    async with running(Disk()) as world:
        client = Client()
        await client.play(world.service, [[create(A)]])
        await client.send(world.service, fb(A, 2))
        for use in ("nothing", "submit", "poll", "model", "runs", "nothing"):
            world.clock.now += 100
            idle = world.service.status().idle_seconds
            assert idle == pytest.approx(100 if use != "submit" else 200, abs=1), use
            match use:
                case "submit":
                    await client.send(world.service, fb(A, 2))
                case "poll":
                    await world.service.outcome(f"{A}:0", 0)
                case "model":
                    world.service.model(A)
                case "runs":
                    world.service.runs()
        assert world.service.status().to_json()["idleSeconds"] == 100


async def test_what_waits_is_counted() -> None:
    """From acceptance to result: what runs, what waits behind it, and what waits for a number that never came."""
    async with running(Disk(), hook=hangs_in_forward_backward) as world:
        assert world.service.status().waiting_operations == 0
        await hang(world)
        client = Client()
        for seq in (2, 5):
            await client.send(world.service, fb(A, seq))
        assert world.service.status().to_json()["waitingOperations"] == 3
        assert world.engine.gate is not None
        world.engine.gate.set()
        await client.ask(world.service, f"{A}:1")
        assert world.service.status().waiting_operations == 2


async def test_a_running_operation_is_use() -> None:
    """However long it takes; its end starts the time anew."""
    async with running(Disk(), hook=hangs_in_forward_backward) as world:
        await hang(world)
        world.clock.now += 500
        status = world.service.status()
        assert status.idle_seconds == 0
        assert status.underway is not None
        assert status.underway.seconds == pytest.approx(500, abs=1)
        assert (status.underway.operation, status.underway.deaths) == (f"{A}:1", 0)
        assert world.engine.gate is not None
        world.engine.gate.set()
        await world.settled()
        assert world.service.status().idle_seconds == pytest.approx(0, abs=1)
        assert world.service.status().underway is None


async def test_an_operation_in_which_a_server_died_is_named() -> None:
    """The next server says which it was before it is tried again, and how much its deaths count."""
    disk = Disk()
    async with running(disk, hook=hangs_in_forward_backward) as world:
        await hang(world)
    async with running(disk, attempt=2, pod="pod-2", hook=hangs_in_forward_backward) as world:
        assert world.service.status().underway == UnderwayStatus(f"{A}:1", None, 1)
        await until(lambda: world.source.engines != [] and world.engine.gate is not None)
        assert world.service.status().to_json()["underway"] == {"operation": f"{A}:1", "seconds": 0, "deaths": 1}


async def test_work_is_told_by_kind_and_outcome() -> None:
    """Each operation counts once; seconds of those that succeed are useful, those of bringing a model back are not."""

    def slow(engine: FakeEngine, op: str) -> None:
        if op == "forward_backward":
            world.clock.now += 3

    async with running(Disk(), hook=slow) as world:
        client = Client()
        await client.play(world.service, [[create(A)], [fb(A, 1)], [fb(A, 2)]])
        await world.settled()
        told = world.service.status().to_json()["work"]
        ended = {(item["kind"], item["outcome"]): item["count"] for item in told["operations"]}
        assert ended == {("create_model", "succeeded"): 1, ("forward_backward", "succeeded"): 2}
        assert float(told["usefulSeconds"]) == pytest.approx(6, abs=1)
        assert float(told["replaySeconds"]) < 1
        world.engine.die()
        await until(lambda: len(world.source.engines) == 2 and world.service.status().state == "Serving")
        after = world.service.status().to_json()["work"]
        assert after["operations"] == told["operations"]
        assert after["usefulSeconds"] == told["usefulSeconds"]
        assert float(after["replaySeconds"]) == pytest.approx(6, abs=1)


async def test_waiting_for_space_is_not_useful() -> None:
    """Of an operation that found the storage full only the try that stored its file counts."""
    files, tries = CrashFiles(Disk()), 0
    creating = files.create

    def create_file(path: str, data: bytes) -> None:
        nonlocal tries
        if path.endswith("state.safetensors"):
            tries += 1
            world.clock.now += 7 if tries == 4 else 100
            if tries < 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        creating(path, data)

    files.create = create_file  # type: ignore[method-assign]
    async with running(files.disk, files=files, replay_budget=1e9) as world:
        await Client().play(world.service, [[create(A)], [save(A, 1, "kept")]])
        await world.settled()
        assert tries == 4
        assert float(world.service.status().to_json()["work"]["usefulSeconds"]) == pytest.approx(7, abs=1)
