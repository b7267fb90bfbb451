"""Any loop, under any disorder and any faults, against the same loop with none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Succeeded
from everloop_trainer.store.compacting import LIMITS, Limits
from tests.session.fake_engine import FakeEngine
from tests.session.world import (
    SESSION,
    A,
    B,
    Client,
    Over,
    create,
    fb,
    freeze,
    load,
    optim,
    running,
    sample,
    save,
    states,
)
from tests.store.crash_files import CrashFiles, Died, Disk

SEED = 20300101
OFTEN = 0.01
"""Seconds between automatic checkpoints, of a clock that moves a millisecond at each look."""
KINDS = (
    "fb",
    "fb",
    "fb",
    "optim",
    "optim",
    "forward",
    "bad",
    "save",
    "freeze",
    "sample",
    "bad-optim",
    "pin",
    "load",
    "load-weights",
    "poison",
    "large",
)


@dataclass(frozen=True)
class Fault:
    """How one incarnation ends: at which effect, and what is left; and how often its engines die."""

    die_at: int
    after: bool
    ending: str
    engine_deaths: tuple[int, ...]


faults = st.builds(
    Fault,
    die_at=st.integers(1, 120),
    after=st.booleans(),
    ending=st.sampled_from(["killed", "power", "chaos", "zombie"]),
    engine_deaths=st.lists(st.integers(1, 60), max_size=3).map(tuple),
)
steps = st.lists(
    st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from(KINDS)), min_size=1, max_size=6), max_size=6
)


def build(plan: list[list[tuple[str, str]]]) -> list[list[Operation]]:
    """Operations of the drawn kinds, numbered; samplers and checkpoints are used from the step after theirs on."""
    numbers = {A: 0, B: 0}
    samplers: list[str] = []
    pins: list[str] = []
    loop: list[list[Operation]] = [[create(A), create(B, rank=8)]]
    samples = 0
    for drawn in plan:
        step: list[Operation] = []
        made: list[str] = []
        pinned: list[str] = []
        for model, kind in drawn:
            if kind == "sample":
                samples += 1
                known = samplers[samples % len(samplers)] if samplers else f"{SESSION}:sample:999"
                step.append(sample(known, samples, "sampler" if samplers else None))
                continue
            numbers[model] += 1
            seq = numbers[model]
            body = f"{model}{seq}".encode()
            match kind:
                case "fb":
                    step.append(fb(model, seq, body))
                case "forward":
                    step.append(fb(model, seq, body, forward_only=True))
                case "bad":
                    step.append(fb(model, seq, b"bad" + body))
                case "poison" | "large":
                    step.append(fb(model, seq, kind.encode() + body))
                case "optim":
                    step.append(optim(model, seq))
                case "bad-optim":
                    step.append(optim(model, seq, -1.0))
                case "save":
                    step.append(save(model, seq, f"n{seq % 3}", overwrite=seq % 2 == 0))
                case "pin":
                    step.append(save(model, seq, f"pin{seq}"))
                    pinned.append(f"tinker://{model}/weights/pin{seq}")
                case "load" | "load-weights":
                    path = pins[-1] if pins else f"tinker://{SESSION}:train:9/weights/none"
                    step.append(load(model, seq, path, optimizer=kind == "load"))
                case "freeze":
                    number = len(samplers) + len(made)
                    made.append(f"{SESSION}:sample:{number}")
                    step.append(freeze(model, seq, number))
        samplers += made
        pins += pinned
        loop.append(step)
    return loop


def disorder(loop: list[list[Operation]], chance: random.Random) -> list[list[Operation]]:
    """Each step in another order, with repeats."""
    mixed = []
    for step in loop:
        sent = [*step, *chance.sample(step, k=len(step) // 2)]
        chance.shuffle(sent)
        mixed.append(sent)
    return mixed


def reaper(deaths: tuple[int, ...]) -> Callable[[FakeEngine, str], None]:
    """A hook under which the engine dies in the given calls."""
    calls = 0

    def hook(engine: FakeEngine, _: str) -> None:
        nonlocal calls
        calls += 1
        if calls in deaths:
            engine.die()

    return hook


async def reference(loop: list[list[Operation]]) -> tuple[dict[str, bytes], Client]:
    client = Client()
    async with running(Disk()) as world:
        await client.play(world.service, loop)
        await world.settled()
        return states(world.engine), client


async def disturbed(
    loop: list[list[Operation]], plan: list[Fault], chance: random.Random, limits: Limits = LIMITS
) -> None:
    adapters, undisturbed = await reference(loop)
    disk, client = Disk(), Client()
    years = random.Random(len(loop))

    def now() -> str:
        """A wall clock that jumps by decades, back and forth."""
        return f"{years.randint(1971, 2105)}-01-01T00:00:00Z"

    zombies = []
    try:
        for attempt, fault in enumerate(plan, start=1):
            files = CrashFiles(disk, die_at=None if fault.ending == "zombie" else fault.die_at, after=fault.after)
            hook = reaper(fault.engine_deaths)
            unaware = 1e6 if fault.ending == "zombie" else 0.01
            world_of = running(
                disk,
                files=files,
                attempt=attempt,
                pod=f"p{attempt}",
                hook=hook,
                fence_interval=unaware,
                now=now,
                checkpoint_every=OFTEN,
                limits=limits,
            )
            try:
                world = await world_of.__aenter__()
            except (*Over, Died):
                pass
            else:
                zombies.append(world_of)
                try:
                    until = chance.randint(0, len(loop)) if fault.ending == "zombie" else len(loop)
                    await client.play(world.service, disorder(loop, chance)[:until])
                except (*Over, Died):
                    pass
            if fault.ending != "zombie":
                files.kill()
            if fault.ending in ("power", "chaos"):
                disk.lose_power(chance if fault.ending == "chaos" else None)
        async with running(
            disk, attempt=len(plan) + 1, pod="last", now=now, checkpoint_every=OFTEN, limits=limits
        ) as world:
            await client.play(world.service, disorder(loop, chance))
            await world.settled()
            assert states(world.engine) == adapters
            assert client.told == undisturbed.told
            assert world.service.status().replay_mismatches == 0
            assert all(recovery.lost_operations == 0 for recovery in world.service.status().recoveries)
    finally:
        for world_of in zombies:
            await world_of.__aexit__(None, None, None)


@seed(SEED)
@settings(
    max_examples=150,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(plan=steps, ends=st.lists(faults, max_size=3), luck=st.integers(0, 1 << 30))
def test_any_loop_under_any_faults(plan: list[list[tuple[str, str]]], ends: list[Fault], luck: int) -> None:
    """Same adapters, same outcomes, each update once: whatever dies, in whatever order the operations arrive."""
    note(f"hypothesis seed {SEED}, luck {luck}")
    asyncio.run(disturbed(build(plan), ends, random.Random(luck)))


def test_the_reference_is_not_trivial() -> None:
    """The generator makes loops that apply updates, fail and sample."""
    loop = build([[(A, "fb"), (A, "optim"), (A, "pin"), (B, "bad")], [(A, "freeze")], [(B, "sample"), (A, "load")]])
    _, client = asyncio.run(reference(loop))
    assert len(client.told) == 9
    assert isinstance(client.told[f"{A}:5"], Succeeded)
