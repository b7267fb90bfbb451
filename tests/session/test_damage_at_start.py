"""A journal that is not what it was, met by an incarnation that starts: where it can be, only one model stops."""

from __future__ import annotations

import copy

import pytest

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Pending, Succeeded
from everloop_trainer.store import layout
from tests.session.compacted import compact, quiet
from tests.session.test_damage import damaged, stopped, waits
from tests.session.world import A, B, Client, create, fb, optim, running, states, unbroken, until
from tests.store.crash_files import Disk

FIRST = layout.journal(1)
LEARN = [[create(A), create(B)], [fb(A, 1, b"request a1"), fb(B, 1, b"b1")], [optim(A, 2), optim(B, 2)]]
GO_ON = [[fb(B, 3, b"b3"), optim(B, 4)]]
AND_A: list[list[Operation]] = [[fb(A, 3, b"a3"), optim(A, 4)]]


@pytest.mark.parametrize("sealed", [False, True], ids=["in the newest journal", "in what was sealed"])
async def test_a_damaged_request_stops_its_model_alone(sealed: bool) -> None:
    """The others go on, incarnation after incarnation; once the bytes are right again it goes on as well."""
    disk, client = Disk(), Client()
    async with running(disk, replay_budget=1e9) as world:
        await client.play(world.service, LEARN)
    if sealed:
        async with running(disk, attempt=2, pod="pod-2", replay_budget=1e9) as world:
            await world.settled()
    with damaged(disk, FIRST, b"request a1"):
        for attempt in (3, 4):
            async with running(disk, attempt=attempt, pod=f"pod-{attempt}", replay_budget=1e9) as world:
                await client.play(world.service, GO_ON)
                assert stopped(world, A, FIRST)
                await client.send(world.service, AND_A[0][0])
                waiting = await world.service.outcome(f"{A}:3", 0)
                assert isinstance(waiting, Pending)
                assert f"is stopped until its storage is mended: could not be restored: {FIRST}: " in waiting.reason
    async with running(disk, attempt=5, pod="pod-5", replay_budget=1e9) as world:
        await client.play(world.service, [*GO_ON, *AND_A])
        assert world.service.status().storage_error == ""
        assert states(world.engine) == (await unbroken([*LEARN, *GO_ON, *AND_A]))[0]


async def test_a_damaged_request_that_waits_is_not_run() -> None:
    """It was accepted and has no result: its model waits with it."""
    disk, client = Disk(), Client()
    async with running(disk, available=False) as world:
        for operation in [*LEARN[0], *LEARN[1], fb(B, 2, b"b2")]:
            await client.send(world.service, operation)
    with damaged(disk, FIRST, b"request a1"):
        async with running(disk, attempt=2, pod="pod-2") as world:
            await waits(world.service, f"{A}:1", FIRST)
            assert isinstance(await client.ask(world.service, f"{B}:2"), Succeeded)
    async with running(disk, attempt=3, pod="pod-3") as world:
        assert isinstance(await client.ask(world.service, f"{A}:1"), Succeeded)
        assert states(world.engine) == (await unbroken([*LEARN[:2], [fb(B, 2, b"b2")]]))[0]


async def test_a_damaged_result_is_never_told_otherwise() -> None:
    """Its model is restored from a snapshot that follows it, and goes on until somebody asks for that result."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, LEARN)
        await quiet(world)
    told = client.told.pop(f"{A}:1")
    assert isinstance(told, Succeeded)
    with damaged(disk, FIRST, told.body):
        async with running(disk, attempt=2, pod="pod-2") as world:
            await client.ask_after(world.service, AND_A[0][0])
            await waits(world.service, f"{A}:1", FIRST)
            await client.play(world.service, GO_ON)
    async with running(disk, attempt=3, pod="pod-3") as world:
        assert await client.ask(world.service, f"{A}:1") == told
        await client.play(world.service, AND_A)
        assert states(world.engine) == (await unbroken([*LEARN, *GO_ON, *AND_A]))[0]


async def test_damage_before_a_snapshot_stops_nothing() -> None:
    """What it was of is in the snapshot."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, LEARN)
        await quiet(world)
    with damaged(disk, FIRST, b"request a1"):
        async with running(disk, attempt=2, pod="pod-2") as world:
            await client.play(world.service, [*GO_ON, *AND_A])
            assert world.service.status().storage_error == ""
            assert states(world.engine) == (await unbroken([*LEARN, *GO_ON, *AND_A]))[0]


async def test_a_compaction_leaves_damage_behind_that_nobody_needs() -> None:
    """The requests that lie before both snapshots of a model are in no base."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, LEARN)
        await quiet(world)
        await client.play(world.service, [*GO_ON, *AND_A])
        await quiet(world)
    content = disk.files[FIRST]
    content.written = content.written.replace(b"request a1", b"request A1")
    async with running(disk, attempt=2, pod="pod-2") as world:
        await compact(world)
        assert world.service.status().storage_error == ""
        assert FIRST not in disk.files


UNKNOWN = {"a request": b'"t":"accept"', "a result": b'"t":"result"'}


@pytest.mark.parametrize("what", UNKNOWN)
async def test_a_record_of_which_nobody_knows_whose_it_was_stops_the_session(what: str) -> None:
    """It may have been the only word of anybody's: unless a base lies behind it, which says all that counts."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, LEARN)
        await quiet(world)
        old = copy.deepcopy(disk)
        await compact(world)
    for each in (old, disk):
        content = each.files.setdefault(FIRST, old.files[FIRST])
        content.written = content.written.replace(UNKNOWN[what], UNKNOWN[what].upper(), 1)
    with pytest.raises(JournalDamaged, match=rf"{FIRST}: damaged at offset \d+: .* cannot be told whose record"):
        async with running(old, attempt=2, pod="pod-2"):
            pass
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, [*LEARN, *GO_ON, *AND_A])
        await until(lambda: world.service.status().storage_error == "")
        assert states(world.engine) == (await unbroken([*LEARN, *GO_ON, *AND_A]))[0]
