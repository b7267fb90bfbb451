"""Copies of checkpoints: training runs of their own that share a file, whatever dies at whatever write."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

from everloop_trainer.session.copying import wanted
from everloop_trainer.session.errors import Fenced
from everloop_trainer.session.history import History
from everloop_trainer.session.keeping import NoCheckpoint, Taken
from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.session.ports import Position, Shared, StateRef
from everloop_trainer.session.records import Accept, Copied, Record, Result, Stored, from_header, to_header
from everloop_trainer.session.rollback import RestoredCheckpoint, RolledBack
from everloop_trainer.session.service import SessionService
from everloop_trainer.store.restored import write_restored
from tests.session.compacted import compact, facts, history_of, opened_copy
from tests.session.kept import HALF, HOUR, OTHER, SAVED, THIN, Calendar, kept_for, keys, listed, stored
from tests.session.world import (
    A,
    B,
    C,
    Client,
    D,
    Over,
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
from tests.store.crash_files import CrashFiles, Died, Disk

RUN, SECOND = "s-copy:train:0", "s-copy:train:1"
COPY, AGAIN = f"tinker://{RUN}/weights/half", f"tinker://{SECOND}/weights/half"
WHEN = "2030-01-01T00:00:00.000Z"


async def test_a_copy_is_a_run_of_its_own_that_shares_the_file() -> None:
    """Of both kinds; its kind, name and size are those of its source, its time and its expiry are not."""
    client, clock = Client(), Calendar()
    async with running(Disk(), now=clock) as world:
        await client.play(world.service, [*SAVED[:2], [kept_for(A, 3, "half", 2 * HOUR)], SAVED[2][1:]])
        await world.service.keeping.publish(HALF, True, "r1")
        before = stored(world)
        clock.hour = 1
        assert await world.service.keeping.copy(HALF, RUN, 4 * HOUR) == COPY
        assert await world.service.keeping.copy(THIN, SECOND, None) == THIN.replace(A, SECOND)
        assert listed(world.service, RUN) == {COPY: "2030-01-01T05:00:00.000Z"}
        assert listed(world.service, SECOND) == {THIN.replace(A, SECOND): None}
        runs = {run.info.model_id: run for run in world.service.runs()}
        (source,), (copy,) = (
            [one for one in runs[run].checkpoints if one.stored.kind == "weights"] for run in (A, RUN)
        )
        assert (copy.stored.size, copy.step, copy.lora) == (source.stored.size, source.step, source.lora)
        assert (copy.stored.time, copy.public, source.public) == ("2030-01-01T01:00:00.000Z", False, True)
        assert runs[RUN].info.base_model == runs[A].info.base_model
        assert runs[RUN].last_request == "2030-01-01T01:00:00.000Z"
        assert stored(world) == before
        assert stored(world, RUN) == stored(world, SECOND) == set()
        assert world.service.keeping.state(COPY)[0] == world.service.keeping.state(HALF)[0]
        assert world.service.model(RUN) is not None
        (session,) = [each for each in world.service.client_sessions() if each.session_id == "s-copy"]
        assert session.models == (RUN, SECOND)
        assert session.checkpoints == 2
        assert len(world.service.status().models) == 2, "it takes no place"


async def test_what_is_loaded_and_sampled_from_a_copy_is_what_was_copied() -> None:
    """Also when the source is gone, from a copy of the copy, and in an incarnation that reads it first."""
    thin, disk, client = THIN.replace(A, RUN), Disk(), Client()
    steps = [[fb(C, 1, b"five"), optim(C, 2)]]
    expected, _ = await unbroken([*SAVED, [load(C, 0, HALF)], *steps])
    _, sampled = await unbroken([*SAVED, [sample(OTHER, 0, THIN)]])
    async with running(disk) as world:
        await client.play(world.service, SAVED)
        await world.service.keeping.copy(HALF, SECOND, None)
        await world.service.keeping.copy(THIN, RUN, None)
        await world.service.keeping.copy(AGAIN, D, None)
        for number, path in enumerate((HALF, THIN, AGAIN)):
            await world.service.keeping.remove(path, f"r{number}")
        looks = world.clock.looks
        await until(lambda: world.clock.looks > looks + 20)
        assert len(stored(world)) == 2
    async with running(disk, attempt=2, pod="pod-2") as world:
        await client.play(world.service, [[load(C, 0, HALF.replace(A, D))], *steps, [sample(OTHER, 0, thin)]])
        assert states(world.engine)[C] == expected[C]
        assert client.told[f"{OTHER}:0"] == sampled[f"{OTHER}:0"]


def left_of(service: SessionService, count: int) -> bool:
    """Whether the records of all checkpoints but so many say that nothing needs them."""
    return len(service._context.history.frozen) == count


@pytest.mark.parametrize("first", [HALF, COPY, AGAIN])
async def test_the_file_goes_with_the_last_that_shares_it(first: str) -> None:
    """Whichever that is: the source, a copy, or a copy of the copy."""
    client = Client()
    left = [path for path in (HALF, COPY, AGAIN) if path != first]
    async with running(Disk()) as world:
        await client.play(world.service, [*SAVED[:2], SAVED[2][:1]])
        await world.service.keeping.copy(HALF, RUN, None)
        await world.service.keeping.copy(COPY, SECOND, None)
        for number, path in enumerate((first, left[0])):
            await world.service.keeping.remove(path, f"r{number}")
            await until(partial(left_of, world.service, 2 - number))
            await world.service.keeping.expire_after(left[1], None, f"t{number}")
            assert len(stored(world)) == 1
        await world.service.keeping.remove(left[1], "r9")
        await until(lambda: stored(world) == set())


async def test_a_copy_outlives_what_expires_is_replaced_and_is_pruned() -> None:
    """And goes at a time of its own, with the file."""
    clock, client = Calendar(), Client()
    async with running(Disk(), now=clock, checkpoint_every=1e-9, checkpoint_keep=1) as world:
        await client.play(world.service, [[create(A)], [kept_for(A, 1, "half", HOUR)], [save(A, 2, "more")]])
        await client.play(world.service, [[fb(A, 3, b"a3"), optim(A, 4)], [fb(A, 5, b"a5"), optim(A, 6)]])
        more, auto = f"tinker://{A}/weights/more", f"tinker://{A}/weights/auto-2"
        await until(lambda: auto in listed(world.service))
        for path, run in ((HALF, RUN), (more, SECOND), (auto, C)):
            await world.service.keeping.copy(path, run, 2 * HOUR)
        copied = keys(world)
        await client.play(world.service, [[save(A, 7, "more", overwrite=True)], [fb(A, 8, b"a8"), optim(A, 9)]])
        await until(lambda: auto not in listed(world.service))
        clock.hour = 1
        await until(lambda: HALF not in listed(world.service))
        await client.play(world.service, [[fb(A, 10, b"a10"), optim(A, 11)]])
        looks = world.clock.looks
        await until(lambda: world.clock.looks > looks + 20)
        assert copied <= stored(world)
        clock.hour = 2
        await until(lambda: stored(world) == keys(world))
        assert not copied & stored(world)


async def test_what_a_copy_shares_is_no_orphan_of_the_next_incarnation() -> None:
    """Nor what is left of it when the source was dropped; once the copy went too, it is one."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, [*SAVED[:2], SAVED[2][:1]])
        await world.service.keeping.copy(HALF, RUN, None)
        await world.service.keeping.remove(HALF, "r1")
        await until(lambda: len(world.service._context.history.frozen) == 1)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await world.settled()
        looks = world.clock.looks
        await until(lambda: world.clock.looks > looks + 20)
        assert len(stored(world)) == 1
        await world.service.keeping.remove(COPY, "r2")
        await until(lambda: stored(world) == set())


async def test_a_repeat_gets_the_same_path_and_makes_nothing() -> None:
    """In another incarnation, after a compaction, and when the copy or its source is gone; the run alone tells it."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, SAVED)
        paths = await asyncio.gather(*(world.service.keeping.copy(HALF, RUN, None) for _ in range(2)))
        assert paths == [COPY, COPY]
        assert await world.service.keeping.copy(THIN, RUN, HOUR) == COPY
        await world.service.keeping.remove(HALF, "r1")
        await until(partial(left_of, world.service, 2))
        assert await world.service.keeping.copy(HALF, RUN, None) == COPY, "and what was written before is durable"
        assert listed(world.service, RUN) == {COPY: None}
        before = facts(history_of(await opened_copy(disk)))
        await compact(world)
        after = facts(history_of(await opened_copy(disk)))
        for name in ("checkpoints", "frozen", "copied", "first_request", "last_request"):
            assert after[name] == before[name]
        assert world.service.keeping.copied(RUN) == COPY
        assert world.service.keeping.copied(A) is None
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert await world.service.keeping.copy(HALF, RUN, None) == COPY
        await world.service.keeping.remove(COPY, "r2")
        assert await world.service.keeping.copy(HALF, RUN, None) == COPY
        assert listed(world.service, RUN) == {}
        kinds = [type(record).__name__ for _, record in (await opened_copy(disk)).history]
        assert kinds.count("Copied") == 0, "there is but the one of the base"


async def test_what_can_not_be_copied_or_made_is_told_so() -> None:
    """No such checkpoint, and a run that is a model, or that somebody tried to make one."""
    client = Client()
    async with running(Disk(), max_models=2) as world:
        await client.play(world.service, SAVED)
        with pytest.raises(NoCheckpoint):
            await world.service.keeping.copy(f"{HALF}-none", RUN, None)
        with pytest.raises(Taken):
            await world.service.keeping.copy(HALF, B, None)
        assert isinstance(await client.ask_after(world.service, create(D)), Failed)
        with pytest.raises(Taken):
            await world.service.keeping.copy(HALF, D, None)
        assert await world.service.keeping.copy(HALF, RUN, None) == COPY, "nothing came of the failure"


async def test_a_copy_can_not_be_trained() -> None:
    """Each operation fails naming what holds it, in any order, also after a compaction; the run stays as it is."""
    disk, client = Disk(), Client()

    async def refused(service: SessionService, *numbers: int) -> None:
        for number in numbers:
            operation = replace(fb(RUN, number), seq=number) if number else create(RUN)
            outcome = await client.ask_after(service, operation)
            assert isinstance(outcome, Failed)
            assert RUN in outcome.error
            assert HALF in outcome.error
        assert listed(service, RUN) == {COPY: None}

    async with running(disk) as world:
        await client.play(world.service, SAVED)
        await world.service.keeping.copy(HALF, RUN, None)
        await refused(world.service, 7, 0, 1)
        await compact(world)
        await refused(world.service, 2)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await refused(world.service, 7, 3)
        assert isinstance(await client.ask_after(world.service, load(C, 0, COPY)), Succeeded)


async def test_nothing_is_said_by_a_superseded_incarnation() -> None:
    """Neither that it copied, nor that it did before, nor that there is nothing to copy."""
    disk, client = Disk(), Client()
    async with running(disk, fence_interval=1e9) as old:
        await client.play(old.service, SAVED)
        await old.service.keeping.copy(HALF, RUN, None)
        async with running(disk, attempt=2, pod="pod-2"):
            for path, run in ((HALF, RUN), (THIN, SECOND), (f"{HALF}-none", C), (HALF, B)):
                with pytest.raises(Fenced):
                    await old.service.keeping.copy(path, run, None)


async def test_copies_in_s3_are_of_each() -> None:
    """The copy is told with the place of its file, and stays when the source goes."""
    client = Client()
    async with running(Disk()) as world:
        await client.play(world.service, [*SAVED[:2], SAVED[2][:1]])
        await world.service.keeping.copy(HALF, RUN, None)
        history = world.service._context.history
        (key,) = keys(world)
        shared = Shared(A, HALF, history.copied[RUN].time)
        copy = StateRef("weights", RUN, key, shared)
        assert set(wanted(history, {})) == {StateRef("weights", A, key), copy}
        await world.service.keeping.remove(HALF, "r1")
        assert wanted(history, {}) == [copy]


async def test_a_copy_that_came_back_from_s3_is_known() -> None:
    """A repeat gets its path, and nobody trains it."""
    disk, client = Disk(), Client()
    one = RestoredCheckpoint("weights", "1-3", "half", 1, "ab", 2, WHEN)
    async with running(Disk()) as world:
        await client.play(world.service, SAVED)
        lora = world.service.runs()[0].info.lora
    write_restored(CrashFiles(disk), (RolledBack(RUN, "smol", lora, 3, 1, COPY, WHEN, (one,), source=HALF),))
    async with running(disk) as world:
        assert await world.service.keeping.copy(HALF, RUN, None) == COPY
        outcome = await Client().ask_after(world.service, create(RUN))
        assert isinstance(outcome, Failed)
        assert HALF in outcome.error
        assert "rolled back" not in outcome.error


def test_records_that_contradict_are_refused() -> None:
    """A copy of what was never stored, and one into what has operations; what is written is read back."""
    known: list[Record] = [
        Accept(A, 0, create(A).args, WHEN),
        Result(A, 0, True, "application/json", 0),
        Accept(A, 1, save(A, 1, "half").args, WHEN),
        Result(A, 1, True, "application/json", 0, stored=Stored("weights", "1-1", "ab", 1, WHEN)),
    ]

    def read(*records: Record) -> History:
        history = History()
        for number, record in enumerate([*known, *records]):
            history.apply(record, Position(1, number))
        return history

    copied = Copied(A, "1-1", RUN, WHEN, None)
    for record in (copied, replace(copied, expires=WHEN)):
        assert from_header(json.dumps(to_header(record)).encode()) == record
    assert read(copied).needs_file(A, "1-1")
    with pytest.raises(ValueError, match="never stored"):
        read(replace(copied, key="1-2"))
    with pytest.raises(ValueError, match="has operations already"):
        read(copied, copied)
    with pytest.raises(ValueError, match="has operations already"):
        read(replace(copied, run=A))


async def copy_and_clean(service: SessionService) -> list[str]:
    """What a loop does in the end, asking again where it has to; returns the paths that it was told."""
    paths = [await service.keeping.copy(HALF, RUN, None), await service.keeping.copy(COPY, SECOND, None)]
    await service.keeping.remove(HALF, "r1")
    await service.keeping.remove(THIN, "r2")
    await service.keeping.remove(COPY, "r3")
    return paths


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
async def test_death_at_every_write(after: bool, power: bool) -> None:
    """Each is made once, under the path that it has for ever; the file stays for the one that is left."""
    files = CrashFiles(Disk())
    async with running(files.disk, files=files) as world:
        await Client().play(world.service, SAVED)
        await copy_and_clean(world.service)
        await until(lambda: len(stored(world)) == 1)
    effects, deaths = files.effects, 0
    for die_at in range(1, effects + 1):
        disk, client, told = Disk(), Client(), list[str]()
        files = CrashFiles(disk, die_at=die_at, after=after)
        try:
            async with running(disk, files=files) as world:
                await client.play(world.service, SAVED)
                told = await copy_and_clean(world.service)
                await until(lambda: len(stored(world)) == 1 or world.files.dead)
        except (*Over, Died):
            pass
        deaths += files.effects >= die_at
        if power:
            disk.lose_power()
        async with running(disk, attempt=2, pod="pod-2") as world:
            if told:
                assert listed(world.service, SECOND) == {AGAIN: None}
                assert listed(world.service, A) == listed(world.service, RUN) == {}
            await client.play(world.service, SAVED)
            assert await copy_and_clean(world.service) == [COPY, AGAIN]
            assert listed(world.service, SECOND) == {AGAIN: None}
            await until(lambda: stored(world) == keys(world, SECOND))
            assert isinstance(await client.ask_after(world.service, load(C, 0, AGAIN)), Succeeded)
            made = [run.run_id for run in world.service._context.history.copied.values()]
            assert made == [RUN, SECOND]
        async with running(disk, attempt=3, pod="pod-3") as world:
            await world.settled()
            await until(lambda: stored(world) == keys(world, SECOND))
            await world.service.keeping.remove(AGAIN, "r4")
            await until(lambda: stored(world) == set())
    assert deaths > 0.8 * effects
