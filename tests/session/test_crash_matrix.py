"""The loop survives a death at every single write."""

from __future__ import annotations

import json
import random

import pytest

from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Failed, Succeeded
from tests.session.world import LOADS, LOOP, A, B, C, Client, D, Over, fb, load, optim, running, states, unbroken
from tests.store.crash_files import CrashFiles, Died, Disk

Loop = list[list[Operation]]
Unbroken = tuple[dict[str, bytes], dict[str, Succeeded | Failed]]


async def count_effects(loop: Loop) -> int:
    disk = Disk()
    files = CrashFiles(disk)
    async with running(disk, files=files) as world:
        await Client().play(world.service, loop)
        await world.settled()
        return files.effects


async def broken_at(
    loop: Loop, die_at: int, expected: Unbroken, *, after: bool, power: bool, chaos: random.Random | None = None
) -> bool:
    """Play the loop with a death at one effect, then again in a new pod; compare with the unbroken run.

    Returns whether that many effects came at all: how many records share a flush differs from run to run.
    """
    disk, client = Disk(), Client()
    files = CrashFiles(disk, die_at=die_at, after=after)
    try:
        async with running(disk, files=files) as world:
            await client.play(world.service, loop)
    except (*Over, Died):
        pass
    if power:
        disk.lose_power(chaos)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, loop)
        await world.settled()
        assert (states(world.engine), client.told) == expected
        assert world.service.status().replay_mismatches == 0
    return files.effects >= die_at


async def test_the_unbroken_loop_applies_each_step_once() -> None:
    """The reference run itself: steps in order, and the step after an undelivered failure applied to nothing."""
    adapters, told = await unbroken(LOOP)
    assert json.loads(adapters[A])["applied"] == [3, 6, 10]
    assert json.loads(adapters[B])["applied"] == [2, 4, 7]
    assert isinstance(told[f"{A}:8"], Failed)


async def test_loaded_models_go_on_as_the_saved_one_did() -> None:
    """With optimizer exactly as the saved model, without it from its weights; never with gradients; or not at all."""
    adapters, told = await unbroken(LOADS)
    a, c, d = (json.loads(adapters[model]) for model in (A, C, D))
    assert c["applied"] == [2, 2], "a failed load costs the step that was sent with it"
    assert (a["applied"], d["applied"]) == ([10, 12], [2, 6])
    losses = {told[f"{model}:{seq}"] for model, seq in ((A, 5), (C, 1), (D, 1), (A, 9))}
    assert len(losses) == 1, "the same weights"
    steps = [told[request] for request in (f"{A}:6", f"{C}:2", f"{D}:2", f"{A}:10")]
    norms = [json.loads(step.body)["metrics"]["norm"] for step in steps if isinstance(step, Succeeded)]
    assert norms[0] == norms[1] != norms[2] == norms[3], "the moments of the checkpoint, or none"
    failed, step = told[f"{C}:3"], told[f"{C}:5"]
    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert failed.error.startswith("path: ")
    assert isinstance(step, Failed)


@pytest.mark.parametrize("loop", [LOOP, LOADS], ids=["loop", "loads"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
async def test_death_at_every_write(loop: Loop, after: bool, power: bool) -> None:
    """Whatever write the process dies at, nothing acknowledged is lost and every update is in the adapter once."""
    effects, expected = await count_effects(loop), await unbroken(loop)
    assert effects > 80
    deaths = 0
    for die_at in range(1, effects + 1):
        deaths += await broken_at(loop, die_at, expected, after=after, power=power)
    assert deaths > 0.8 * effects


@pytest.mark.parametrize("loop", [LOOP, LOADS], ids=["loop", "loads"])
async def test_power_loss_that_leaves_holes(loop: Loop) -> None:
    """What was not flushed may survive in part and out of order; the loop comes back all the same."""
    effects, expected = await count_effects(loop), await unbroken(loop)
    for die_at in range(1, effects + 1, 2):
        await broken_at(loop, die_at, expected, after=True, power=True, chaos=random.Random(die_at))


async def test_a_load_whose_snapshot_is_stored_needs_its_source_no_more() -> None:
    """Dead after the manifest, before the result or later: the source may go, the load recognises its own snapshot."""
    loop = [*LOADS[:3], [load(C, 0, f"tinker://{A}/weights/half")], [fb(C, 1, b"c1"), optim(C, 2)]]
    effects, expected, gone = await count_effects(loop), await unbroken(loop), 0
    for die_at in range(1, effects + 1):
        disk, client = Disk(), Client()
        try:
            async with running(disk, files=CrashFiles(disk, die_at=die_at, after=True)) as world:
                await client.play(world.service, loop)
        except (*Over, Died):
            pass
        if any(name.startswith(f"models/{storage_id(C)}/") and name.endswith("manifest.json") for name in disk.files):
            gone += 1
            CrashFiles(disk).delete(f"models/{storage_id(A)}/checkpoints")
        async with running(disk, attempt=2, pod="pod-2") as world:
            await client.play(world.service, loop)
            await world.settled()
            assert (states(world.engine), client.told) == expected
    assert gone > 1
