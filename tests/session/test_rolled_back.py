"""Models whose storage was lost: nothing of them goes on silently, and their checkpoints are there to go on from."""

from __future__ import annotations

import asyncio
import json

import pytest

from everloop_trainer.session.copying import wanted
from everloop_trainer.session.history import History
from everloop_trainer.session.lora import Lora
from everloop_trainer.session.outcomes import Failed, Succeeded
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Restored, from_header, to_header
from everloop_trainer.session.rollback import RestoredCheckpoint, RolledBack
from everloop_trainer.session.service import SessionService
from everloop_trainer.store.restored import write_restored
from tests.session.compacted import compact, facts, history_of, opened_copy
from tests.session.told import Told
from tests.session.world import (
    PATIENCE,
    A,
    C,
    Client,
    create,
    fb,
    freeze,
    load,
    optim,
    running,
    running_on,
    save,
    states,
    until,
)
from tests.store.crash_files import CrashFiles, Disk

HALF = f"tinker://{A}/weights/half"
GOING_ON = [[fb(C, 1, b"five"), optim(C, 2)]]


async def lose() -> tuple[Disk, bytes]:
    """A model with a checkpoint, whose storage is lost but for that; and what it becomes when it goes on from there."""
    first, second, client = Disk(), Disk(), Client()
    async with running(first) as world:
        await client.play(world.service, [[create(A)], [fb(A, 1, b"a1"), optim(A, 2)], [save(A, 3, "half")]])
        saved = world.service.runs()[0].checkpoints[0]
        await client.play(world.service, [[load(C, 0, HALF)], *GOING_ON])
        expected = states(world.engine)[C]
    stored = saved.stored
    model = RolledBack(
        model_id=A,
        base_model="smol",
        lora=saved.lora,
        number=3,
        step=1,
        resume=HALF,
        time="2030-01-02T00:00:00Z",
        checkpoints=(RestoredCheckpoint("weights", stored.key, "half", 1, stored.sha256, stored.size, stored.time),),
    )
    files = CrashFiles(second)
    for name in [name for name in first.files if f"weights/{stored.key}/" in name]:
        with CrashFiles(first).open_read(name) as file:
            files.create(name, file.read())
    write_restored(files, (model,))
    return second, expected


async def journaled(disk: Disk) -> History:
    """What is on a disk once that has a record of what was rolled back: no call waits for it. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE):
        while not (history := history_of(await opened_copy(disk))).streams:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
    return history


async def all_fail(service: SessionService) -> None:
    """Whatever number: sent before the loss, after it, early, or never sent at all."""
    client = Client()
    for operation in (optim(A, 40), fb(A, 2), create(A), save(A, 7, "more"), optim(A, 4)):
        outcome = await client.ask_after(service, operation)
        assert isinstance(outcome, Failed)
        assert outcome.category == "user"
        assert (
            f"rolled back to operation 3 (step 1), and what came after it is gone; go on from {HALF!r}" in outcome.error
        )
    never = await service.outcome(f"{A}:39", 0)
    assert isinstance(never, Failed)
    assert HALF in never.error


async def test_every_operation_of_a_rolled_back_model_names_where_to_go_on() -> None:
    """Also after a restart, and after a compaction; it takes no place among the models, and stays listed."""
    disk, _ = await lose()
    async with running(disk) as world:
        await world.settled()
        await all_fail(world.service)
        await compact(world)
        await all_fail(world.service)
    async with running(disk, attempt=2, pod="pod-2") as world:
        await world.settled()
        await all_fail(world.service)
        assert world.service.status().models == ()
        [run] = world.service.runs()
        assert (run.info.model_id, [each.name for each in run.checkpoints]) == (A, ["half"])


async def test_its_checkpoint_is_loaded_as_if_nothing_had_happened() -> None:
    """Into a new model, which goes on to the same bits, with no more models than one allowed."""
    disk, expected = await lose()
    async with running(disk, max_models=1) as world:
        client = Client()
        await client.play(world.service, [[load(C, 0, HALF)], *GOING_ON])
        assert all(isinstance(told, Succeeded) for told in client.told.values())
        assert states(world.engine) == {C: expected}
    async with running(disk, attempt=2, pod="pod-2", max_models=1) as world:
        await world.settled()
        assert states(world.engine) == {C: expected}


async def test_it_is_journaled_once() -> None:
    """By whichever incarnation comes to it; a death before that leaves it to the next."""
    disk, _ = await lose()
    for attempt in (1, 2, 3):
        async with running(disk, attempt=attempt, pod=f"pod-{attempt}") as world:
            await world.settled()
            await journaled(disk)
    store = await opened_copy(disk)
    assert sum(isinstance(record, Restored) for _, record in store.history) == 1


async def test_a_compacted_history_says_the_same() -> None:
    """What was rolled back, its checkpoints and its time are in the base."""
    disk, _ = await lose()
    async with running(disk) as world:
        await world.settled()
        before = facts(await journaled(disk))
        await compact(world)
    after = facts(history_of(await opened_copy(disk)))
    for name in ("models", "checkpoints", "frozen", "rolled_back", "last_request"):
        assert after[name] == before[name], name
    assert after["streams"][A].closed


def test_a_model_that_has_operations_can_not_be_restored() -> None:
    """That would make a history of two beginnings."""
    history = History()
    record = Restored(RolledBack(A, "smol", Lora(4, 7, True, True, True), 3, 1, HALF, "t"))
    history.apply(record, Position(1, 0))
    with pytest.raises(ValueError, match="was restored, but has operations already"):
        history.apply(record, Position(1, 9))


def test_the_record_is_read_as_it_was_written() -> None:
    """Metadata of its checkpoints included."""
    checkpoint = RestoredCheckpoint("weights", "1-3", "half", 1, "ab" * 32, 10, "t", {"note": ["x", 1]})
    record = Restored(RolledBack(A, "smol", Lora(4, 7, True, True, True), 3, 1, HALF, "t", (checkpoint,)))
    assert from_header(json.dumps(to_header(record)).encode()) == record


# --- what is to be copied -------------------------------------------------------------------------------------------


async def test_checkpoints_with_a_name_and_the_newest_snapshot_are_to_be_copied() -> None:
    """What was frozen for a sampler only is not; the report is in the status."""
    told = Told()
    async with running_on(CrashFiles(Disk()), copies=told) as world:
        client = Client()
        await client.play(
            world.service, [[create(A)], [fb(A, 1, b"a1"), optim(A, 2)], [freeze(A, 3, 0)], [save(A, 4, "half")]]
        )
        await world.settled()
        await until(lambda: len(told.states) == 2)
        assert [(state.kind, state.model) for state in told.states] == [("weights", A), ("snapshots", A)]
        assert told.models == {A}
        assert world.service.status().to_json()["copies"] == {"pending": 3, "lastTime": "", "error": "away"}


async def test_what_was_restored_is_to_be_copied_again() -> None:
    """Until another copy of it is known to be there."""
    disk, _ = await lose()
    history = history_of(await opened_copy(disk))
    assert wanted(history, {}) == []
    async with running(disk) as world:
        await world.settled()
        history = await journaled(disk)
    assert [state.kind for state in wanted(history, {})] == ["weights"]
