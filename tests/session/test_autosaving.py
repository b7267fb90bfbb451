"""Automatic checkpoints: named, listed, loadable, pruned; whatever dies at whatever write."""

from __future__ import annotations

import asyncio

import pytest

from everloop_trainer.session.errors import EngineRefused
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Succeeded
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Pruned, Record
from everloop_trainer.session.status import AutomaticCheckpoints
from tests.session.fake_engine import FakeEngine
from tests.session.world import (
    LOOP,
    TIME,
    A,
    B,
    C,
    Client,
    Over,
    Running,
    create,
    fb,
    load,
    optim,
    running,
    save,
    states,
    unbroken,
    until,
)
from tests.store.crash_files import CrashFiles, Died, Disk

EPILOGUE: list[list[Operation]] = [[fb(A, 11, b"a11"), optim(A, 12), fb(B, 8, b"b8"), optim(B, 9)]]
KEPT = 2


def steps(first: int, last: int) -> list[list[Operation]]:
    """Optimizer steps of A by their count."""
    return [[fb(A, 2 * n - 1, b"a%d" % n), optim(A, 2 * n)] for n in range(first, last + 1)]


def listed(world: Running, model: str = A) -> list[str]:
    """Names of a model's checkpoints, oldest first."""
    (run,) = (run for run in world.service.runs() if run.info.model_id == model)
    return sorted((str(one.name) for one in run.checkpoints), key=lambda name: (len(name), name))


def is_sound(world: Running) -> bool:
    """Whether no more than is kept is listed, and no automatic checkpoint has a file that is not listed."""
    for run in world.service.runs():
        named = {one.stored.key: str(one.name) for one in run.checkpoints}
        automatic = {key for key, name in named.items() if name.removeprefix("auto-").isdecimal()}
        saves = {key.partition("-")[2] for key in named.keys() - automatic}
        there = world.files.list(f"models/{storage_id(run.info.model_id)}/checkpoints/weights")
        unsaved = {key for key in there if key.partition("-")[2].partition(".")[0] not in saves}
        if not (0 < len(automatic) <= KEPT and unsaved == automatic):
            return False
    return True


async def assert_sound(world: Running) -> None:
    """It comes to that once the step's checkpoint is taken; and whatever is listed is there as its hash says."""
    await until(lambda: is_sound(world))
    for run in world.service.runs():
        for one in run.checkpoints:
            path = f"models/{storage_id(run.info.model_id)}/checkpoints/{one.stored.kind}/{one.stored.key}"
            assert world.files.sha256(f"{path}/state.safetensors") == (one.stored.sha256, one.stored.size)


async def test_they_are_named_by_step_and_only_the_newest_stay() -> None:
    """`auto-<step>`; what the client saved itself stays, whatever its name."""
    async with running(Disk(), checkpoint_every=0.001) as world:
        await Client().play(world.service, [[create(A)], *steps(1, 4), [save(A, 9, "auto-mine")]])
        assert listed(world) == ["auto-3", "auto-4", "auto-mine"]
        await Client().play(world.service, [[fb(A, 10), optim(A, 11)]])
        await until(lambda: listed(world) == ["auto-4", "auto-5", "auto-mine"])
        await assert_sound(world)


async def test_a_change_holds_from_the_next_step_on() -> None:
    """Another interval and another number count for models that are there already; 0 ends it."""
    client = Client()
    async with running(Disk(), checkpoint_every=1e9) as world:
        await client.play(world.service, [[create(A)], *steps(1, 2)])
        assert listed(world) == []
        world.service.take_checkpoints(AutomaticCheckpoints(0.001, 1))
        await client.play(world.service, steps(3, 4))
        await until(lambda: listed(world) == ["auto-4"])
        world.service.take_checkpoints(AutomaticCheckpoints(0.0, 1))
        await client.play(world.service, steps(5, 6))
        await world.settled()
        assert listed(world) == ["auto-4"]
        assert world.service.status().checkpoints == AutomaticCheckpoints(0.0, 1)


async def test_a_save_of_the_same_name_takes_its_place() -> None:
    """A loop that names its own saves so is told the same whether there are automatic ones or not."""
    client, own = Client(), save(A, 9, "auto-4")
    async with running(Disk(), checkpoint_every=0.001) as world:
        await client.play(world.service, [[create(A)], *steps(1, 4)])
        await until(lambda: listed(world) == ["auto-3", "auto-4"])
        assert isinstance(await client.ask_after(world.service, own), Succeeded)
        twice = await client.ask_after(world.service, save(A, 10, "auto-4"))
        assert not isinstance(twice, Succeeded)
        await client.play(world.service, [[fb(A, 11), optim(A, 12)], [fb(A, 13), optim(A, 14)]])
        await until(lambda: listed(world) == ["auto-4", "auto-5", "auto-6"])
        assert isinstance(await client.ask_after(world.service, load(A, 15, f"tinker://{A}/weights/auto-4")), Succeeded)


async def test_one_that_failed_shows_until_the_next_is_stored() -> None:
    """The loop goes on without it; snapshots of the same model say nothing about it."""
    failing = True

    def hook(_: FakeEngine, op: str) -> None:
        if op == "write" and failing:
            raise EngineRefused("Input/output error", "server")

    client = Client()
    async with running(Disk(), checkpoint_every=0.001, hook=hook) as world:
        await client.play(world.service, [[create(A)], *steps(1, 3)])
        await world.service.drain(10)
        assert world.service.status().storage_error == f"automatic checkpoint of {A}: Input/output error"
        assert world.service.status().last_snapshot_time == TIME
    async with running(Disk(), checkpoint_every=0.001, hook=hook, replay_budget=1e9) as world:
        await Client().play(world.service, [[create(A)], *steps(1, 3)])
        await until(lambda: "Input/output error" in world.service.status().storage_error)
        failing = False
        await Client().play(world.service, steps(4, 5))
        await until(lambda: world.service.status().storage_error == "")
        await until(lambda: listed(world)[-1:] == ["auto-5"])


async def test_without_an_interval_there_are_none() -> None:
    """`everySeconds: 0`."""
    async with running(Disk()) as world:
        await Client().play(world.service, [[create(A)], *steps(1, 4)])
        assert listed(world) == []


async def test_one_that_is_to_be_loaded_is_not_pruned() -> None:
    """A load that was accepted finds it, though it is superseded meanwhile; then it goes."""
    client = Client()
    async with running(Disk(), checkpoint_every=0.001) as world:
        await client.play(world.service, [[create(A)], *steps(1, 3)])
        await until(lambda: listed(world) == ["auto-2", "auto-3"])
        gate = world.engine.gate = asyncio.Event()
        (step,) = steps(4, 4)
        for operation in step:
            await client.send(world.service, operation)
        loading = load(C, 0, f"tinker://{A}/weights/auto-2")
        await client.send(world.service, loading)
        world.engine.calls.clear()
        gate.set()
        await client.play(world.service, [[*step, fb(A, 9), optim(A, 10)], [loading]])
        assert isinstance(client.told[loading.request_id], Succeeded)
        await client.play(world.service, [[fb(A, 11), optim(A, 12)]])
        await until(lambda: listed(world) == ["auto-5", "auto-6"])
        gone = await client.ask_after(world.service, load(A, 13, f"tinker://{A}/weights/auto-2"))
        assert not isinstance(gone, Succeeded)


async def test_a_load_that_comes_while_others_are_pruned_finds_its_own() -> None:
    """Two are superseded at once; what is accepted during the write for the first keeps the second."""
    disk, client = Disk(), Client()
    async with running(disk, checkpoint_every=0.001, checkpoint_keep=3) as world:
        await client.play(world.service, [[create(A)], *steps(1, 4)])
        await until(lambda: listed(world) == ["auto-2", "auto-3", "auto-4"])
    async with running(disk, attempt=2, pod="pod-2", checkpoint_every=0.001, checkpoint_keep=2) as world:
        await client.play(world.service, [[create(B)]])
        loading, sent = load(B, 1, f"tinker://{A}/weights/auto-3"), list[asyncio.Task[None]]()
        appending = world.store.journal.append

        def append(record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
            if isinstance(record, Pruned) and not sent:
                sent.append(asyncio.ensure_future(client.send(world.service, loading)))
            return appending(record, body)

        world.store.journal.append = append  # type: ignore[method-assign]
        await client.play(world.service, steps(5, 5))
        await until(lambda: bool(sent))
        await sent[0]
        assert isinstance(await client.ask(world.service, loading.request_id), Succeeded)


async def test_a_model_of_an_earlier_incarnation_is_saved_at_its_next_step() -> None:
    """However long ago that was: pods that live shorter than the interval must not mean that there is none."""
    disk, client = Disk(), Client()
    async with running(disk, checkpoint_every=1e9) as world:
        await client.play(world.service, [[create(A)], *steps(1, 2)])
        assert listed(world) == []
    async with running(disk, attempt=2, pod="pod-2", checkpoint_every=1e9) as world:
        await client.play(world.service, steps(3, 4))
        assert listed(world) == ["auto-3"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
async def test_death_at_every_write(after: bool, power: bool) -> None:
    """The loop ends as if there were none; listing and files agree, and nothing of a half-made one stays."""
    expected = await unbroken([*LOOP, *EPILOGUE])
    disk, client = Disk(), Client()
    files = CrashFiles(disk)
    async with running(disk, files=files, checkpoint_every=0.001) as world:
        await client.play(world.service, LOOP)
        await world.settled()
    effects, deaths = files.effects, 0
    for die_at in range(1, effects + 1):
        disk, client = Disk(), Client()
        files = CrashFiles(disk, die_at=die_at, after=after)
        try:
            async with running(disk, files=files, checkpoint_every=0.001) as world:
                await client.play(world.service, LOOP)
        except (*Over, Died):
            pass
        deaths += files.effects >= die_at
        if power:
            disk.lose_power()
        async with running(disk, attempt=2, pod="pod-2", checkpoint_every=0.001) as world:
            await client.play(world.service, [*LOOP, *EPILOGUE])
            await world.settled()
            assert (states(world.engine), client.told) == expected
            await assert_sound(world)
    assert deaths > 0.8 * effects
