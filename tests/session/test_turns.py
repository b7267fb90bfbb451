"""Whose turn it is, as a table; and that it is so in a session whose keys have more to do than its engine can."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from everloop_trainer.session.outcomes import Succeeded
from everloop_trainer.session.runner import MOST_SAMPLES
from everloop_trainer.session.turns import Keys, Turns
from tests.session.world import Client, create, fb, optim, running, sample, until
from tests.store.crash_files import Disk

ONE, TWO, THREE = "s-1:train:0", "s-2:train:0", "s-3:train:0"


def order(waiting: Mapping[str, int], keys: Mapping[str, str]) -> str:
    """The last letters of streams in the order in which they get their turns, if each has so many operations."""
    known, left, taken = Keys(), dict(waiting), ""
    for stream, key in keys.items():
        known.hear(f"{stream}:train:0", key)
    turns = Turns(lambda stream: known.of(f"{stream}:train:0"))
    for stream in waiting:
        turns.offer(stream)
    while any(left.values()):
        turn = turns.take(lambda name: name if left[name] else None, lambda name: not left[name])
        assert turn is not None
        left[turn] -= 1
        taken += turn[-1]
    assert turns.take(lambda name: name, lambda name: not left[name]) is None
    return taken


@pytest.mark.parametrize(
    ("waiting", "keys", "expected"),
    [
        ({"a": 3}, {}, "aaa"),
        ({"a": 3, "b": 1}, {}, "abaa"),
        ({"a": 2, "b": 2, "c": 2}, {"a": "x", "b": "x", "c": "y"}, "acbcab"),
        ({"a": 4, "b": 4, "c": 4, "d": 2}, {"a": "x", "b": "x", "c": "x", "d": "y"}, "adbdcabcabcabc"),
        ({"a": 2, "b": 1}, {"b": "x"}, "aba"),
        ({"a": 0, "b": 1}, {"a": "x", "b": "x"}, "b"),
    ],
)
def test_keys_take_turns_and_of_a_key_its_streams(
    waiting: Mapping[str, int], keys: Mapping[str, str], expected: str
) -> None:
    """However many streams a key has, another's turn comes after one of its operations."""
    assert order(waiting, keys) == expected


def test_who_is_not_ready_loses_no_turn() -> None:
    """Whoever becomes ready is the first again, before those that have had their turns."""
    turns, ready = Turns(lambda stream: stream), {"b"}
    for stream in "abc":
        turns.offer(stream)

    def take() -> str | None:
        return turns.take(lambda name: name if name in ready else None, lambda _: False)

    assert [take(), take()] == ["b", "b"]
    ready |= {"a", "c"}
    assert [take(), take(), take(), take()] == ["a", "c", "b", "a"]


def test_a_key_that_is_heard_of_later_gathers_its_streams() -> None:
    """A server that has just started learns from the next call whose a session is; until then it is its own."""
    keys = Keys()
    turns = Turns(keys.of)
    for stream in (ONE, TWO, THREE):
        turns.offer(stream)
    assert keys.known(ONE) is None
    assert keys.hear(ONE, "x")
    assert keys.hear(TWO, "x")
    assert not keys.hear(f"{TWO}:17", "x")
    assert keys.known(TWO) == "x"
    turns.regroup()
    taken = [turns.take(lambda name: name, lambda _: False) for _ in range(4)]
    assert taken == [ONE, THREE, TWO, THREE]


def samplers(count: int) -> Sequence[str]:
    return [f"s-greedy:sample:{number}" for number in range(count)]


async def test_a_key_with_thousands_of_samples_keeps_no_other_waiting() -> None:
    """They fill the engine; another's first sample goes in all the same, and of those that wait every second is its."""
    async with running(Disk()) as world:
        client, service = Client(), world.service
        for stream in (*samplers(4), "s-modest:sample:0"):
            service.hear(stream, stream.split(":")[0].removeprefix("s-"))
        await until(lambda: bool(world.source.engines))
        gate = world.engine.gate = asyncio.Event()
        for seq in range(MOST_SAMPLES):
            for stream in samplers(4):
                await client.send(service, sample(stream, seq, None, seed=seq))
        await until(lambda: len(world.engine.keys) == MOST_SAMPLES)
        for seq in range(3):
            await client.send(service, sample("s-modest:sample:0", seq, None, seed=seq))
        await until(lambda: len(world.engine.keys) == MOST_SAMPLES + 1)
        assert world.engine.keys[MOST_SAMPLES:] == ["modest"]
        gate.set()
        for seq in range(3):
            assert isinstance(await client.ask(service, f"s-modest:sample:0:{seq}"), Succeeded)
        modest = [number for number, key in enumerate(world.engine.keys) if key == "modest"]
        assert modest[1] <= MOST_SAMPLES + 2
        assert modest[2] <= MOST_SAMPLES + 4


async def test_steps_of_a_key_with_many_models_alternate_with_those_of_others() -> None:
    """Three models of one key and one of another, heard of late: an operation of this comes after one of those."""
    greedy, modest = [f"s-greedy{number}:train:0" for number in range(3)], "s-modest:train:0"
    async with running(Disk(), available=False) as world:
        for model in (*greedy, modest):
            for operation in (create(model), fb(model, 1), optim(model, 2)):
                await world.service.accept(operation)
        for model in (*greedy, modest):
            world.service.hear(model, model[2:8])
        world.source.available = True
        assert isinstance(await Client().ask(world.service, f"{greedy[-1]}:2"), Succeeded)
        steps = ("init", "forward_backward", "optim_step")
        assert "".join(model[2] for op, model, _ in world.engine.calls if op in steps) == "gmgmgmgggggg"
