"""Whether another adapter fits is asked before it is made, and said in numbers."""

from __future__ import annotations

import pytest

from everloop_trainer.session.admission import refuse_memory
from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.session.ports import Lora, Room
from tests.session.world import A, B, C, Client, create, fb, load, running, save
from tests.store.crash_files import Disk

MEBIBYTE = 2**20
LORA = Lora(64, 7, True, True, True)
TIGHT = Room(4_000_000, 61 * MEBIBYTE, 50 * MEBIBYTE, 2048 * MEBIBYTE, "the memory limit of the pod")
MESSAGE = (
    "create_model: an adapter of rank 64 has 4,000,000 trained values and needs 61.0 MiB with optimizer and "
    "gradients; 50.0 MiB are free of the 2,048.0 MiB of the memory limit of the pod"
)


@pytest.mark.parametrize(
    ("needed", "free", "refused"),
    [(10, 11, False), (10, 10, False), (11, 10, True), (1, 0, True), (1, -5 * MEBIBYTE, True), (0, 0, False)],
)
def test_what_fits_is_not_refused(needed: int, free: int, refused: bool) -> None:
    """To the byte; what is overdrawn counts as nothing free."""
    error = refuse_memory("create_model", LORA, Room(1, needed, free, 2048, "x"))
    assert (error is not None) is refused
    assert "-" not in (error or "")


def test_the_refusal_has_the_numbers() -> None:
    """What is asked for, what it needs, what is free, and of what."""
    assert refuse_memory("create_model", LORA, TIGHT) == MESSAGE


async def test_a_model_without_room_is_refused_for_good_and_the_others_go_on() -> None:
    """The error is the user's; no engine makes the model, and a successor with more memory tells the same."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A)]])
        world.source.rooms[64] = TIGHT
        await client.play(world.service, [[create(B, rank=64)], [fb(B, 1)], [fb(A, 1)], [create(C, rank=8)]])
        assert client.told[f"{B}:0"] == Failed(MESSAGE, "user")
        refused = client.told[f"{B}:1"]
        assert isinstance(refused, Failed)
        assert MESSAGE in refused.error
        assert isinstance(client.told[f"{A}:1"], Succeeded)
        assert isinstance(client.told[f"{C}:0"], Succeeded)
        assert ("init", B, -1) not in world.engine.calls
    async with running(disk, attempt=2) as world:
        await world.settled()
        assert {model.model_id for model in world.service.status().models} == {A, C}
        assert ("init", B, -1) not in world.engine.calls


async def test_a_checkpoint_without_room_makes_no_model() -> None:
    """A load that would create one is refused like a creation; into a model that exists it needs no more."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A, rank=64)], [fb(A, 1)], [save(A, 2, "n")]])
        world.source.rooms[64] = TIGHT
        path = f"tinker://{A}/weights/n"
        await client.play(world.service, [[load(B, 0, path)], [load(A, 3, path)]])
        refused = client.told[f"{B}:0"]
        assert isinstance(refused, Failed)
        assert refused == Failed(MESSAGE.replace("create_model", "load_weights"), "user")
        assert isinstance(client.told[f"{A}:3"], Succeeded)


async def test_models_that_exist_are_restored_without_being_asked_for_room() -> None:
    """They were accepted: an engine that finds less memory than its predecessor still takes them up."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [[create(A, rank=64)], [fb(A, 1)]])
        world.source.rooms[64] = TIGHT
        world.engine.die()
        await client.play(world.service, [[fb(A, 2)]])
        assert isinstance(client.told[f"{A}:2"], Succeeded)
        assert len(world.source.engines) == 2
