"""Checkpoints that are removed, that expire, and that newer ones replace; whatever dies at whatever write."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from everloop_trainer.session.copying import wanted
from everloop_trainer.session.errors import Fenced
from everloop_trainer.session.history import History
from everloop_trainer.session.keeping import CHECKPOINTS, InUse, NoCheckpoint
from everloop_trainer.session.operations import Operation, SaveWeights, SaveWeightsForSampler
from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.session.ports import Position, StateKind
from everloop_trainer.session.records import Accept, Amended, Dropped, Record, Removed, Result, Stored
from everloop_trainer.session.service import SessionService
from tests.session.compacted import compact, facts, history_of, opened_copy
from tests.session.kept import HALF, HOUR, OTHER, SAVED, THIN, Calendar, kept_for, keys, listed, stored
from tests.session.world import (
    A,
    B,
    C,
    Client,
    Over,
    Running,
    create,
    fb,
    load,
    running,
    sample,
    save,
    unbroken,
    until,
)
from tests.store.crash_files import CrashFiles, Died, Disk


async def test_what_is_removed_is_found_no_more_and_its_file_goes() -> None:
    """The others stay; its name is free again; a load of it fails naming the path."""
    client = Client()
    async with running(Disk()) as world:
        await client.play(world.service, SAVED)
        await world.service.keeping.remove(HALF, "r1")
        assert listed(world.service) == {THIN: None}
        gone = await client.ask_after(world.service, load(C, 0, HALF))
        assert isinstance(gone, Failed)
        assert HALF in gone.error
        await until(lambda: stored(world) == keys(world))
        assert isinstance(await client.ask_after(world.service, save(A, 5, "half")), Succeeded)
        assert listed(world.service) == {HALF: None, THIN: None}
        await world.service.keeping.remove(HALF, "r2")
        latest = world.service.status().models[0].latest_checkpoint
        assert latest is not None
        assert latest.name == "thin"


async def test_a_repeat_removes_nothing_else() -> None:
    """By its key, also in another incarnation and after a compaction; and what never was is told so."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, SAVED)
        await world.service.keeping.remove(HALF, "r1")
        await world.service.keeping.remove(HALF, "r2")  # its answer was lost, and the SDK began anew
        await client.ask_after(world.service, save(A, 5, "half"))
        await world.service.keeping.remove(HALF, "r1")
        assert HALF in listed(world.service)
        with pytest.raises(NoCheckpoint):
            await world.service.keeping.remove(f"tinker://{A}/weights/never", "r3")
        with pytest.raises(NoCheckpoint):
            await world.service.keeping.expire_after(f"tinker://{A}/weights/never", HOUR, "r3")
        await compact(world)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await world.service.keeping.remove(HALF, "r1")
        assert HALF in listed(world.service)
        await world.service.keeping.remove(HALF, "r4")
        assert HALF not in listed(world.service)


async def test_a_repeat_is_known_for_a_day() -> None:
    """Then nothing is left of it."""
    clock, client = Calendar(), Client()
    async with running(Disk(), now=clock) as world:
        await client.play(world.service, SAVED)
        await world.service.keeping.remove(HALF, "r1")
        clock.hour = 25
        await world.service.keeping.remove(THIN, "r2")
        with pytest.raises(NoCheckpoint):
            await world.service.keeping.remove(HALF, "r1")
        await world.service.keeping.remove(THIN, "r3")


async def test_what_was_accepted_before_still_reads_it() -> None:
    """A load into a new model and a sample, sent before the removal and run after it; only then the files go."""
    client = Client()
    loading, sampling = load(C, 0, HALF), sample(OTHER, 0, THIN)
    async with running(Disk()) as world:
        await client.play(world.service, SAVED)
        world.engine.gate = asyncio.Event()
        await client.send(world.service, fb(A, 5))  # holds the engine up
        await client.send(world.service, loading)
        await client.send(world.service, sampling)
        before = stored(world)
        await world.service.keeping.remove(HALF, "r1")
        await world.service.keeping.remove(THIN, "r2")
        assert listed(world.service) == {}
        looks = world.clock.looks
        await until(lambda: world.clock.looks > looks + 20)
        assert stored(world) == before
        assert wanted(world.service._context.history, {}) == [], "nobody could load a copy of it"
        world.engine.gate.set()
        assert isinstance(await client.ask(world.service, loading.request_id), Succeeded)
        assert isinstance(await client.ask(world.service, sampling.request_id), Succeeded)
        await until(lambda: stored(world) == set())


async def test_a_load_of_the_model_itself_comes_first() -> None:
    """It looks for the path when it is its turn: until then the removal has to be asked for again, and expiry waits."""
    clock, client = Calendar(), Client()
    again = load(A, 6, HALF)
    async with running(Disk(), now=clock) as world:
        await client.play(world.service, [*SAVED[:2], [kept_for(A, 3, "half", HOUR)]])
        world.engine.gate = asyncio.Event()
        await client.send(world.service, fb(A, 4))
        await client.send(world.service, fb(A, 5))
        await client.send(world.service, again)
        with pytest.raises(InUse):
            await world.service.keeping.remove(HALF, "r1")
        clock.hour = 2
        looks = world.clock.looks
        await until(lambda: world.clock.looks > looks + 20)
        assert HALF in listed(world.service)
        world.engine.gate.set()
        assert isinstance(await client.ask(world.service, again.request_id), Succeeded)
        await until(lambda: listed(world.service) == {})


async def test_one_that_expires_goes_at_its_time() -> None:
    """As the save said, or as was said later; what is told to stay stays."""
    clock, client = Calendar(), Client()
    early, late, ever = (f"tinker://{A}/weights/{name}" for name in ("early", "late", "ever"))
    async with running(Disk(), now=clock) as world:
        saves = [kept_for(A, 1, "early", 2 * HOUR), kept_for(A, 2, "late", 2 * HOUR), kept_for(A, 3, "ever", 2 * HOUR)]
        await client.play(world.service, [[create(A)], saves])
        assert set(listed(world.service).values()) == {"2030-01-01T02:00:00.000Z"}
        clock.hour = 1
        await world.service.keeping.expire_after(late, 4 * HOUR, "r1")
        await world.service.keeping.expire_after(ever, None, "r2")
        assert listed(world.service)[late] == "2030-01-01T05:00:00.000Z"
        clock.hour = 2
        await until(lambda: early not in listed(world.service))
        await world.service.keeping.expire_after(late, 40 * HOUR, "r1")  # a repeat
        assert listed(world.service) == {late: "2030-01-01T05:00:00.000Z", ever: None}
        clock.hour = 48
        await until(lambda: listed(world.service) == {ever: None})
        await until(lambda: stored(world) == keys(world))


async def test_what_is_published_is_told_until_it_is_not() -> None:
    """Beside its time, also after a restart; a repeat changes nothing; what takes its place is its owner's alone."""
    disk, client = Disk(), Client()

    def public(world: Running) -> list[str]:
        return [str(one.path) for run in world.service.runs() for one in run.checkpoints if one.public]

    async with running(disk) as world:
        await client.play(world.service, SAVED)
        await world.service.keeping.expire_after(HALF, HOUR, "r1")
        await world.service.keeping.publish(HALF, True, "r2")
        await world.service.keeping.publish(THIN, True, "r3")
        await world.service.keeping.publish(THIN, False, "r4")
        await world.service.keeping.publish(THIN, True, "r3")
        assert public(world) == [HALF]
        assert listed(world.service)[HALF] == "2030-01-01T01:00:00.000Z"
        with pytest.raises(NoCheckpoint):
            await world.service.keeping.publish(f"{HALF}-none", True, "r5")
        await compact(world)
    async with running(disk, attempt=2, pod="pod-2") as world:
        assert public(world) == [HALF]
        await world.service.keeping.expire_after(HALF, None, "r6")
        assert public(world) == [HALF]
        await client.ask_after(world.service, save(A, 5, "half", overwrite=True))
        assert public(world) == []


async def test_expiry_is_a_fact_of_the_history() -> None:
    """A restart long after it reads no clock in its replay: what was loaded before is there, what was after is not."""
    clock, disk, client = Calendar(), Disk(), Client()
    async with running(disk, now=clock, replay_budget=1e9) as world:
        await client.play(world.service, [[create(A)], [kept_for(A, 1, "half", HOUR)], [load(C, 0, HALF)]])
        clock.hour = 1
        await until(lambda: listed(world.service) == {})
        gone = await client.ask_after(world.service, load(B, 0, HALF))
        assert isinstance(gone, Failed)
    clock.hour = 100
    async with running(disk, attempt=2, pod="pod-2", now=clock, replay_budget=1e9) as world:
        await client.play(world.service, [[create(A)], [load(C, 0, HALF)], [load(B, 0, HALF)]])
        await world.settled()
        kinds = [type(record).__name__ for _, record in (await opened_copy(disk)).history]
        assert kinds.count("Removed") == kinds.count("Dropped") == 1


async def test_what_a_newer_one_replaced_goes() -> None:
    """overwrite: one file of that name stays, once the sample that was accepted before has read the older."""
    client = Client()
    sampling = sample(OTHER, 0, HALF)
    expected = await unbroken([*SAVED, [sampling]])
    async with running(Disk()) as world:
        await client.play(world.service, SAVED)
        world.engine.gate = asyncio.Event()
        await client.send(world.service, fb(A, 5))
        await client.send(world.service, sampling)
        world.engine.gate.set()
        await client.play(world.service, [[save(A, 6, "half", overwrite=True)], [sampling]])
        assert client.told[sampling.request_id] == expected[1][sampling.request_id]
        await until(lambda: stored(world) == keys(world))
        assert len(stored(world)) == 2


async def test_what_samplers_follow_stays() -> None:
    """A named save that inflight samplers use is off the list, and serves them until the next such save."""
    client = Client()
    named = Operation(A, 3, SaveWeightsForSampler("thin", None, "inflight"))
    follower = Operation(A, 4, SaveWeightsForSampler(None, 7, "inflight"))
    async with running(Disk()) as world:
        await client.play(world.service, [*SAVED[:2], [follower_first(A, 3)], [replace(named, seq=4)]])
        await world.service.keeping.remove(THIN, "r1")
        assert listed(world.service) == {}
        looks = world.clock.looks
        await until(lambda: world.clock.looks > looks + 20)
        sampled = await client.ask_after(world.service, sample(OTHER, 0))
        assert isinstance(sampled, Succeeded)
        assert len(stored(world)) == 2
        await client.ask_after(world.service, replace(follower, seq=5))
        await until(lambda: len(stored(world)) == 2 and not any(key.startswith("1-4") for key in stored(world)))


def follower_first(model: str, seq: int) -> Operation:
    """A sampler that follows the model's newer weights."""
    return Operation(model, seq, SaveWeightsForSampler(None, 7, "inflight"))


async def test_what_is_just_being_saved_is_not_swept() -> None:
    """The file of an earlier incarnation that the save recognises as its own, before its result counts."""
    disk, client, saving = Disk(), Client(), save(A, 1, "half")
    async with running(disk) as world:
        await client.play(world.service, [[create(A)]])
        appending = world.store.journal.append

        def die(record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
            if isinstance(record, Result):
                world.files.kill()
            return appending(record, body)

        world.store.journal.append = die  # type: ignore[method-assign]
        await client.send(world.service, saving)
        await until(lambda: world.files.dead)
    looked, listing = asyncio.Event(), list[object]()
    async with running(disk, attempt=2, pod="pod-2") as world:
        states, appending = world.service._context.states, world.store.journal.append
        looking = states.keys

        async def look(kind: StateKind, model: str) -> list[tuple[str, int, int]]:
            await looked.wait()
            listing.append(kind)
            return await looking(kind, model)

        def append(record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
            if isinstance(record, Result):
                looked.set()
            return appending(record, body)

        states.keys = look  # type: ignore[method-assign]
        world.store.journal.append = append  # type: ignore[method-assign]
        assert isinstance(await client.ask(world.service, saving.request_id), Succeeded)
        await until(lambda: len(listing) == len(CHECKPOINTS))
        looks = world.clock.looks
        await until(lambda: world.clock.looks > looks + 20)
        assert stored(world) == keys(world) == {"1-1"}


async def test_nothing_is_said_by_a_superseded_incarnation() -> None:
    """Neither that it removed something, nor that it did so before, nor that there is no such thing."""
    disk, client = Disk(), Client()
    async with running(disk, fence_interval=1e9) as old:
        await client.play(old.service, SAVED)
        await old.service.keeping.remove(HALF, "r1")
        async with running(disk, attempt=2, pod="pod-2"):
            for path, request in ((HALF, "r1"), (THIN, "r2"), (f"{HALF}-none", "r3")):
                with pytest.raises(Fenced):
                    await old.service.keeping.remove(path, request)
                with pytest.raises(Fenced):
                    await old.service.keeping.expire_after(path, HOUR, request)


def test_a_save_may_come_before_the_removal_of_what_it_replaces() -> None:
    """Its result was on its way into the journal when the removal of the older one was decided: both readings agree."""

    def read(records: list[Record]) -> History:
        history = History()
        for number, record in enumerate(records):
            history.apply(record, Position(1, number))
        return history

    when = "2030-01-01T00:00:00.000Z"
    known: list[Record] = [
        Accept(A, 0, create(A).args, when),
        Result(A, 0, True, "application/json", 0),
        Accept(A, 1, SaveWeights("half"), when),
        Result(A, 1, True, "application/json", 0, stored=Stored("weights", "1-1", "ab", 1, when)),
        Accept(A, 2, SaveWeights("half", overwrite=True), when),
    ]
    newer = Result(A, 2, True, "application/json", 0, stored=Stored("weights", "1-2", "cd", 1, when))
    changes: list[Record] = [
        Removed(A, "1-1", when, "r1"),
        Amended(A, "1-1", when, "r1", "2030-01-02T00:00:00.000Z", True),
    ]
    for change in changes:
        first, second = read([*known, newer, change]), read([*known, change, newer])
        assert first.checkpoints == second.checkpoints
        assert first.checkpoints[HALF].stored.key == "1-2"
        assert first.checkpoints[HALF].expires is None
        assert first.handled.keys() == second.handled.keys() == {(HALF, "r1")}
    with pytest.raises(ValueError, match="dropped but is listed"):
        read([*known, newer, Dropped(A, "1-2")])


async def test_what_is_left_after_a_compaction_is_the_same() -> None:
    """Removed, expiring, replaced and handled: the base says what the records said."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(
            world.service, [*SAVED, [kept_for(A, 5, "brief", HOUR)], [save(A, 6, "half", overwrite=True)]]
        )
        await world.service.keeping.remove(THIN, "r1")
        await until(lambda: stored(world) == keys(world))
        before = facts(history_of(await opened_copy(disk)))
        await compact(world)
        after = facts(history_of(await opened_copy(disk)))
    for name in ("checkpoints", "frozen", "handled", "models"):
        assert after[name] == before[name]


async def clean_up(service: SessionService) -> None:
    """What a loop does in the end; asks again where it has to, as the gateway does."""
    await service.keeping.expire_after(f"tinker://{A}/weights/more", 2 * HOUR, "r1")
    await service.keeping.remove(HALF, "r2")
    await service.keeping.remove(THIN, "r3")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
async def test_death_at_every_write(after: bool, power: bool) -> None:
    """What was acknowledged as removed is so for ever; files and listing agree; a later save of that name stays."""
    again = [[save(A, 5, "more")], [save(A, 6, "half", overwrite=True)]]
    last = [[save(A, 7, "half")]]
    more = f"tinker://{A}/weights/more"
    expected = await unbroken([*SAVED, *again])
    files = CrashFiles(Disk())
    async with running(files.disk, files=files) as world:
        await Client().play(world.service, [*SAVED, *again])
        await clean_up(world.service)
        await until(lambda: stored(world) == keys(world))
    effects, deaths = files.effects, 0
    for die_at in range(1, effects + 1):
        disk, client, cleaned = Disk(), Client(), False
        files = CrashFiles(disk, die_at=die_at, after=after)
        try:
            async with running(disk, files=files) as world:
                await client.play(world.service, [*SAVED, *again])
                await clean_up(world.service)
                cleaned = True
                await until(lambda: stored(world) == keys(world) or world.files.dead)
        except (*Over, Died):
            pass
        deaths += files.effects >= die_at
        if power:
            disk.lose_power()
        async with running(disk, attempt=2, pod="pod-2") as world:
            if cleaned:
                assert set(listed(world.service)) == {more}
            await client.play(world.service, [*SAVED, *again])
            assert client.told == expected[1]
            await clean_up(world.service)
            await client.play(world.service, last)
            await clean_up(world.service)
            assert listed(world.service) == {more: "2030-01-01T02:00:00.000Z", HALF: None}
            await until(lambda: stored(world) == keys(world))
        async with running(disk, attempt=3, pod="pod-3") as world:
            assert listed(world.service) == {more: "2030-01-01T02:00:00.000Z", HALF: None}
    assert deaths > 0.8 * effects
