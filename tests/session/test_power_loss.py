"""Power is lost at every write of a loop on a real file system: nothing that the client was told is taken back.

The loop runs once, over some processes that are killed on the way, and each call that changes a file is recorded, with
what the client learns in between. Then, for each point of that history, the disk is laid out as it may be there after
the loss, and a new pod goes on from it with a client that remembers what it had been told by then.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from everloop_trainer.durable import write_file
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.session.service import SessionService
from everloop_trainer.store import layout
from everloop_trainer.store import states as stored_states
from everloop_trainer.store.files import PosixFiles
from tests.session.world import LOADS, LOOP, Client, Over, Serving, running_on, states, unbroken
from tests.store.crash_files import Died
from tests.store.power import Machine, Name, Recorder, Sync, Tree, Write, lay_out

SEED = 20300101
OFTEN = 0.05
"""Seconds between automatic checkpoints, of a clock that moves a millisecond at each look."""
Loop = list[list[Operation]]
Unbroken = tuple[dict[str, bytes], dict[str, Succeeded | Failed]]


@dataclass
class VolumeFiles(PosixFiles):
    """The file layer of one process on a volume."""

    root: Path
    dead: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.root)

    def kill(self) -> None:
        self.dead = True

    def hangs(self, path: str) -> bool:
        return False

    def write_state(self, path: str, data: bytes) -> None:
        """By what a real engine writes its state with."""
        write_file(Path(path), [data], 0o600)


@dataclass
class Told:
    """What a client knows for good: requests that were acknowledged, their outcomes, and whom it talks to."""

    acknowledged: set[str] = field(default_factory=set)
    outcomes: dict[str, Succeeded | Failed] = field(default_factory=dict)
    lineage: str = ""

    @classmethod
    def of(cls, learned: list[Any]) -> Told:
        told = cls()
        for kind, *what in learned:
            match kind:
                case "lineage":
                    (told.lineage,) = what
                case "acknowledged":
                    told.acknowledged.add(what[0])
                case "told":
                    told.outcomes[what[0]] = what[1]
        return told


@dataclass
class Noting(Client):
    """A client whose memory is part of the recorded history."""

    recorder: Recorder | None = None

    async def send(self, service: SessionService, operation: Operation) -> None:
        await super().send(service, operation)
        assert self.recorder is not None
        self.recorder.learned(("acknowledged", operation.request_id))

    async def ask(self, service: SessionService, request: str) -> Succeeded | Failed:
        outcome = await super().ask(service, request)
        assert self.recorder is not None
        self.recorder.learned(("told", request, outcome))
        return outcome


def record(
    loop: Loop,
    volume: Path,
    kill_at: int | None = None,
    replay_budget: float = 0.0,
    fence_interval: float = 0.01,
) -> Recorder:
    """Play the loop, killed before its effect of that number and started again in place, to its end."""
    volume.mkdir()
    recorder = Recorder(volume)
    client = Noting(recorder=recorder)

    async def boot() -> None:
        files = VolumeFiles(volume / "tenant/run")
        async with running_on(
            files, replay_budget=replay_budget, checkpoint_every=OFTEN, fence_interval=fence_interval
        ) as world:
            recorder.learned(("lineage", world.store.lineage))
            await client.play(world.service, loop)
            await world.settled()
            await world.service._runner.snapshots._settle()  # its threads write and delete until then

    recorder.die_at = kill_at
    with recorder.recording():
        try:
            with own_threads():
                asyncio.run(boot())
        except (*Over, Died):
            assert recorder.dead
        if recorder.dead:
            recorder.revive()
            with own_threads():
                asyncio.run(boot())
    return recorder


@contextmanager
def own_threads() -> Iterator[None]:
    """A process ends with all of its threads: those of the stored states would write on in the next one."""
    made: list[ThreadPoolExecutor] = []

    def executor(*given: Any, **named: Any) -> ThreadPoolExecutor:
        made.append(ThreadPoolExecutor(*given, **named))
        return made[-1]

    try:
        with mock.patch.object(stored_states, "ThreadPoolExecutor", executor):
            yield
    finally:
        for each in made:
            each.shutdown(wait=True)


def points(recorder: Recorder) -> Iterator[tuple[Machine, Sync | Name | Write | None]]:
    """The machine just before each of its effects, and which that is; and in the end."""
    machine = Machine()
    for event in recorder.events:
        if isinstance(event, Sync | Name | Write):
            yield machine, event
        machine.take(event)
    yield machine, None


def assert_stored(world: Serving[VolumeFiles], told: Told) -> None:
    """Each checkpoint that the client was told of, or that is listed, is on disk with the hash recorded for it."""
    history = world.service._context.history
    stored = [
        (checkpoint.model_id, checkpoint.stored) for run in world.service.runs() for checkpoint in run.checkpoints
    ]
    for request in told.outcomes:
        entry = history.entry(request)
        assert entry is not None
        assert entry.ended is not None, f"{request} was told and has no result any more"
        if entry.ended.result.stored is not None:
            stored.append((entry.stream, entry.ended.result.stored))
    for model, each in stored:
        where = layout.state(storage_id(model), each.kind, each.key)
        assert world.files.sha256(f"{where}/{layout.STATE}") == (each.sha256, each.size)
        assert world.files.exists(f"{where}/{layout.MANIFEST}")


async def go_on(content: Tree, told: Told, loop: Loop, expected: Unbroken, root: Path) -> None:
    """A new pod on what is left."""
    lay_out(content, root)
    client = Client(set(told.acknowledged), dict(told.outcomes))
    files = VolumeFiles(root / "tenant/run")
    async with running_on(files, attempt=2, pod="pod-2", checkpoint_every=OFTEN) as world:
        assert told.lineage in ("", world.store.lineage), "the session is another one"
        assert_stored(world, told)
        await client.play(world.service, loop)
        await world.settled()
        assert (states(world.engine), client.told) == expected
        assert world.service.status().replay_mismatches == 0
        assert all(recovery.lost_operations == 0 for recovery in world.service.status().recoveries)
        assert_stored(world, told)


@pytest.fixture
def quick_flushes() -> Iterator[None]:
    """What is left after a loss is on a disk that needs no flush."""
    with mock.patch.object(os, "fsync"), mock.patch.object(os, "fdatasync"):
        yield


@pytest.fixture(params=["loop", "loads"])
def loop(request: pytest.FixtureRequest) -> Loop:
    """A loop of two models with saves and samples, or one of loads of each kind."""
    return {"loop": LOOP, "loads": LOADS}[request.param]


@pytest.mark.usefixtures("quick_flushes")
def test_nothing_is_needed_that_was_not_flushed(loop: Loop, tmp_path: Path) -> None:
    """All bytes and names that were not flushed are gone, at the last moment before each next flush."""
    expected, recorder = asyncio.run(unbroken(loop)), record(loop, tmp_path / "volume")
    losses, before = 0, (Tree(), 0)
    for machine, effect in points(recorder):
        left = machine.durable()
        if isinstance(effect, Sync | None) and (left, len(machine.learned)) != before:
            losses, before = losses + 1, (left, len(machine.learned))
            asyncio.run(go_on(left, Told.of(machine.learned), loop, expected, tmp_path / f"left-{losses}"))
    assert losses > 50


@pytest.mark.usefixtures("quick_flushes")
def test_anything_may_be_left_of_what_was_not_flushed(loop: Loop, tmp_path: Path) -> None:
    """Bytes and names that were not flushed are there in part, torn and in any order, new and removed ones."""
    expected, recorder = asyncio.run(unbroken(loop)), record(loop, tmp_path / "volume")
    chance = random.Random(SEED)
    losses = 0
    for machine, _ in points(recorder):
        left = machine.survivor(chance)
        if left != machine.tree() and left != machine.durable() and chance.random() < 0.5:
            losses += 1
            asyncio.run(go_on(left, Told.of(machine.learned), loop, expected, tmp_path / f"left-{losses}"))
    assert losses > 30


def before_flushes(recorder: Recorder) -> list[int]:
    """Effects before which to kill: each flush of the name of an identity or a manifest, and some of the others."""
    numbers, recent = [], ""
    chance = random.Random(SEED)
    for number, (_, effect) in enumerate(points(recorder), start=1):
        if isinstance(effect, Sync):
            if recent in (layout.IDENTITY, layout.MANIFEST) or chance.random() < 0.1:
                numbers.append(number)
            recent = ""
        elif isinstance(effect, Name) and effect.child is not None:
            recent = effect.name
    return numbers


@pytest.mark.usefixtures("quick_flushes")
def test_what_a_killed_process_left_is_not_taken_for_flushed(loop: Loop, tmp_path: Path) -> None:
    """Killed before a flush, started again in place, and in the end the power goes: nothing was built on sand.

    Without snapshots, so that a loaded model has nothing but the one of its load; and without what a session notes by
    the clock, so that the effects have the same numbers in each run.
    """
    expected = asyncio.run(unbroken(loop))
    unkilled = record(loop, tmp_path / "unkilled", replay_budget=1e9, fence_interval=1e6)
    for at in before_flushes(unkilled):
        recorder = record(loop, tmp_path / f"volume-{at}", at, replay_budget=1e9, fence_interval=1e6)
        machine = Machine.after(recorder.events)
        told = Told.of(machine.learned)
        assert told.outcomes == expected[1]
        asyncio.run(go_on(machine.durable(), told, loop, expected, tmp_path / f"left-{at}"))
