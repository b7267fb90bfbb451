"""The loop survives a death at every single write."""

from __future__ import annotations

import json
import random

import pytest

from everloop_trainer.session.outcomes import Failed, Succeeded
from tests.session.world import LOOP, A, B, Client, Over, running, states, unbroken
from tests.store.crash_files import CrashFiles, Died, Disk

Unbroken = tuple[dict[str, bytes], dict[str, Succeeded | Failed]]


async def count_effects() -> int:
    disk = Disk()
    files = CrashFiles(disk)
    async with running(disk, files=files) as world:
        await Client().play(world.service, LOOP)
        await world.settled()
        return files.effects


async def broken_at(
    die_at: int, expected: Unbroken, *, after: bool, power: bool, chaos: random.Random | None = None
) -> bool:
    """Play the loop with a death at one effect, then again in a new pod; compare with the unbroken run.

    Returns whether that many effects came at all: how many records share a flush differs from run to run.
    """
    disk, client = Disk(), Client()
    files = CrashFiles(disk, die_at=die_at, after=after)
    try:
        async with running(disk, files=files) as world:
            await client.play(world.service, LOOP)
    except (*Over, Died):
        pass
    if power:
        disk.lose_power(chaos)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, LOOP)
        await world.settled()
        assert (states(world.engine), client.told) == expected
        assert world.service.status().replay_mismatches == 0
    return files.effects >= die_at


async def test_the_unbroken_loop_applies_each_step_once() -> None:
    """The reference run itself: steps in order, and the step after an undelivered failure applied to nothing."""
    adapters, told = await unbroken()
    assert json.loads(adapters[A])["applied"] == [3, 6, 10]
    assert json.loads(adapters[B])["applied"] == [2, 4, 7]
    assert isinstance(told[f"{A}:8"], Failed)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
async def test_death_at_every_write(after: bool, power: bool) -> None:
    """Whatever write the process dies at, nothing acknowledged is lost and every update is in the adapter once."""
    effects, expected = await count_effects(), await unbroken()
    assert effects > 80
    deaths = 0
    for die_at in range(1, effects + 1):
        deaths += await broken_at(die_at, expected, after=after, power=power)
    assert deaths > 0.8 * effects


async def test_power_loss_that_leaves_holes() -> None:
    """What was not flushed may survive in part and out of order; the loop comes back all the same."""
    effects, expected = await count_effects(), await unbroken()
    for die_at in range(1, effects + 1, 2):
        await broken_at(die_at, expected, after=True, power=True, chaos=random.Random(die_at))
