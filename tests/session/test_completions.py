"""What is told to one who waits for all samples of a client: each end once, in order, and none is missing."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from everloop_trainer.session.completions import BLOCK, MOST_LOST, Completion, Completions
from everloop_trainer.session.numbers import Numbers
from everloop_trainer.session.operations import Sample
from everloop_trainer.session.outcomes import JSON, PROTOBUF
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Result
from everloop_trainer.session.streams import Ended, Entry, Owed, Stream
from tests.session.test_sampling import START, send_samples
from tests.session.world import PATIENCE, SAMPLER, Client, running, sample
from tests.store.crash_files import Disk

ARGS = Sample((1,), 1, 4, 1.0, 1.0, -1, None, 5, None)
AT = Position(1, 0)


def end(completions: Completions, stream: Stream, seq: int, ok: bool = True) -> None:
    """A sample is accepted and ends."""
    stream.accept(Entry(SAMPLER, seq, ARGS, AT, durable=True))
    result = Result(SAMPLER, seq, ok, PROTOBUF if ok else JSON, 0)
    completions.ended(stream.end(seq, Ended(result, AT)), 7)


def told(completions: Completions, stream: Stream, cursor: int, client: int = 0) -> tuple[list[int], int]:
    """The numbers that have ended behind a cursor, and the next one."""
    found, cursor = completions.after(cursor, stream, client, lost=False)
    return [int(each.request_id.rpartition(":")[2]) for each in found], cursor


def test_what_ends_is_told_in_order_until_its_cursor_comes_back() -> None:
    """An answer that was lost is given again; one that arrived is not."""
    completions, stream = Completions(3), Stream(SAMPLER)
    assert told(completions, stream, 0)[0] == []
    for seq in (2, 0):
        end(completions, stream, seq)
    found, first = told(completions, stream, 0)
    assert found == [2, 0]
    assert told(completions, stream, 0) == (found, first)
    end(completions, stream, 1)
    assert told(completions, stream, 0)[0] == [2, 0, 1]
    found, second = told(completions, stream, first)
    assert (found, second > first) == ([1], True)
    assert told(completions, stream, second) == ([], second)
    assert told(completions, stream, second + 1000)[0] == []
    end(completions, stream, 3)
    assert told(completions, stream, second)[0] == [3]


def test_each_client_of_a_session_has_a_list_of_its_own() -> None:
    """By blocks of 10^9 numbers."""
    completions, stream = Completions(1), Stream(SAMPLER)
    for client in (0, 1, 7):
        assert told(completions, stream, 0, client)[0] == []
    for seq in (BLOCK - 1, BLOCK, 2 * BLOCK - 1, 7 * BLOCK + 5):
        end(completions, stream, seq)
    assert told(completions, stream, 0, 0)[0] == [BLOCK - 1]
    assert told(completions, stream, 0, 1)[0] == [BLOCK, 2 * BLOCK - 1]
    assert told(completions, stream, 0, 7)[0] == [7 * BLOCK + 5]


def test_another_incarnation_begins_with_what_nobody_has_fetched() -> None:
    """Whatever the cursor says; results that are in a base are among it, those that are gone are not."""
    old, stream = Completions(1), Stream(SAMPLER)
    told(old, stream, 0)
    for seq in range(6):
        end(old, stream, seq, ok=seq != 3)
    _, cursor = told(old, stream, 0)
    stream.fetched = Numbers([(1, 3)])
    stream.gone = Numbers([(20, 22)])
    stream.owed = Owed("base", array("Q", [7, 9, BLOCK + 1]), array("Q", [0, 1, 2]))
    stream.fetched.add(9)
    new = Completions(2)
    found, later = new.after(cursor, stream, 0, lost=False)
    assert [(int(c.request_id.rpartition(":")[2]), c.ok) for c in found] == [
        (0, True),
        (3, False),
        (4, True),
        (5, True),
        (7, True),
    ]
    assert told(new, stream, cursor)[0] == [0, 3, 4, 5, 7]
    assert told(new, stream, later)[0] == []


@pytest.mark.parametrize("highest", [3, 20_000, BLOCK - 1])
def test_what_went_with_a_storage_is_told_to_have_failed(highest: int) -> None:
    """Around the highest number that is known, and never more than a client may wait for."""
    stream = Stream(SAMPLER)
    end(Completions(1), stream, highest)
    end(Completions(1), stream, BLOCK)
    found, _ = Completions(2).after(0, stream, 0, lost=True)
    failed = {int(each.request_id.rpartition(":")[2]) for each in found if not each.ok}
    first, last = max(0, highest - MOST_LOST), min(BLOCK, highest + MOST_LOST) - 1
    assert failed == {*range(first, last + 1)} - {highest}
    assert Completion(f"{SAMPLER}:{highest}", ok=True) in found


async def test_a_question_waits_for_the_first_that_ends() -> None:
    """And no longer than it may; sizes are those of the results."""
    client = Client()
    async with running(Disk()) as world:
        await client.play(world.service, START)
        assert await world.service.completions(SAMPLER, 0, 0, 0) is None
        gate = world.engine.gate = asyncio.Event()
        await send_samples(client, world, 3)
        found = await world.service.completions(SAMPLER, 0, 0, 0.001)
        assert found is not None
        assert found[0] == []
        waiting = [asyncio.create_task(world.service.completions(SAMPLER, 0, found[1], 600)) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        for each in waiting:
            answer = await asyncio.wait_for(each, PATIENCE)
            assert answer is not None
            assert answer[0]
        for seq in range(3):
            await client.ask(world.service, f"{SAMPLER}:{seq}")
        answer = await world.service.completions(SAMPLER, 0, 0, 0)
        assert answer is not None
        sizes = {each.request_id: each.size for each in answer[0]}
        assert sizes == {request: len(client.told[request].body) for request in sizes}  # type: ignore[union-attr]
        assert len(sizes) == 3


async def test_a_later_server_tells_what_was_never_fetched() -> None:
    """With the cursor of the one before, which had told the client already."""
    disk, client = Disk(), Client()
    async with running(disk) as world:
        await client.play(world.service, START)
        await send_samples(client, world, 4)
        cursor, ended = 0, set[str]()
        while len(ended) < 4:
            found = await world.service.completions(SAMPLER, 0, cursor, 60)
            assert found is not None
            ended |= {each.request_id for each in found[0]}
            cursor = found[1]
    async with running(disk, attempt=2, pod="pod-2") as world:
        found = await world.service.completions(SAMPLER, 0, cursor, 60)
        assert found is not None
        assert {each.request_id for each in found[0]} == ended
        await client.send(world.service, sample(SAMPLER, 4))
        found = await world.service.completions(SAMPLER, 0, found[1], 60)
        assert found is not None
        assert [each.request_id for each in found[0]] == [f"{SAMPLER}:4"]
