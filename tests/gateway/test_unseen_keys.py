"""Keys that the watch has not shown yet: how often the API server is asked, by a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from everloop_gateway import keys, unseen_keys
from everloop_gateway.kube import ApiUnavailable
from everloop_gateway.unseen_keys import TooManyQuestions, UnseenKeys


def key(number: int, key_id: str = "0" * 12) -> str:
    return f"tml-{key_id}-{number:043}"


class Server:
    """What the API server holds, and what it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held: dict[str, str] = {}
        self.asked: list[str] = []
        self.away = False
        self.unseen = UnseenKeys(self._read, lambda: self.now)

    def hold(self, text: str) -> None:
        self.held[keys.key_id_of(text)] = text

    async def _read(self, key_id: str) -> keys.KeyRecord | None:
        self.asked.append(key_id)
        await asyncio.sleep(0)
        if self.away:
            raise ApiUnavailable("away")
        text = self.held.get(key_id)
        return None if text is None else keys.KeyRecord(key_id, keys.digest(text), "team", "ann", None)

    async def opens(self, text: str) -> bool:
        return await self.unseen.find(text, keys.key_id_of(text)) is not None


async def test_a_key_that_the_server_holds_opens_until_it_is_withdrawn() -> None:
    """One question does for many calls, and for a short while."""
    server = Server()
    server.hold(key(1))
    assert all(await asyncio.gather(*(server.opens(key(1)) for _ in range(20))))
    assert len(server.asked) == 1
    server.held.clear()
    server.now += unseen_keys.FOUND_SECONDS
    assert not await server.opens(key(1))


async def test_a_key_that_it_does_not_hold_is_asked_for_seldom() -> None:
    """Not again within a few seconds, and then it may be there."""
    server = Server()
    assert not any(await asyncio.gather(*(server.opens(key(1)) for _ in range(20))))
    server.hold(key(1))
    server.now += unseen_keys.MISSING_SECONDS - 0.1
    assert not await server.opens(key(1))
    assert len(server.asked) == 1
    server.now += 0.1
    assert await server.opens(key(1))
    assert len(server.asked) == 2


async def test_a_wrong_key_is_not_in_the_way_of_the_right_one_with_its_id() -> None:
    """A key that was replaced opens nothing; the one that took its place does, at the same moment."""
    server = Server()
    server.hold(key(2))
    assert not await server.opens(key(1))
    assert await server.opens(key(2))


async def test_guessing_is_bounded() -> None:
    """So many questions at once, then so many a second; known answers cost nothing, and the memory has an end."""
    server = Server()
    guesses = [key(0, f"{n:012x}") for n in range(unseen_keys.BURST + 1)]
    for guess in guesses[:-1]:
        assert not await server.opens(guess)
    with pytest.raises(TooManyQuestions):
        await server.opens(guesses[-1])
    assert not await server.opens(guesses[0])
    server.now += 1 / unseen_keys.REQUESTS_PER_SECOND
    assert not await server.opens(guesses[-1])
    with pytest.raises(TooManyQuestions):
        await server.opens(key(0, "f" * 12))
    server.now += 3600
    for _ in range(unseen_keys.BURST):
        assert not await server.opens(guesses.pop())
    with pytest.raises(TooManyQuestions):
        await server.opens(key(0, "f" * 12))


async def test_the_memory_of_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest answer is forgotten, and asked for again."""
    monkeypatch.setattr(unseen_keys, "REMEMBERED", 3)
    server = Server()
    for n in (0, 1, 2, 3, 3, 2, 0):
        assert not await server.opens(key(n, f"{n:012x}"))
    assert [int(key_id, 16) for key_id in server.asked] == [0, 1, 2, 3, 0]


async def test_a_server_that_is_away_refuses_nobody() -> None:
    """Whether there is such a key can't be told, and is asked again; who has gone leaves no trace."""
    server = Server()
    server.hold(key(1))
    server.away = True
    failures = await asyncio.gather(*(server.opens(key(1)) for _ in range(3)), return_exceptions=True)
    assert [type(failure) for failure in failures] == [ApiUnavailable] * 3
    gone = asyncio.create_task(server.opens(key(1)))
    await asyncio.sleep(0)
    gone.cancel()
    server.away = False
    assert await server.opens(key(1))
    assert len(server.asked) == 2
