"""Keys that this replica's watch has not shown yet: the API server is asked for them, seldom and once.

A driver may call the moment its key is in the API server, and a refusal would end it for good. What a caller can make
happen by guessing is bounded: one request per key for a while, and so many in all.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from everloop_gateway.keys import KeyRecord, digest, fits

FOUND_SECONDS = 2.0
"""How long an answer stands in for the watch; a key that is revoked meanwhile is good for so much longer."""
MISSING_SECONDS = 5.0
"""How long a key that opens nothing is not asked for again."""
REMEMBERED = 4096
BURST = 20
REQUESTS_PER_SECOND = 5.0


class TooManyQuestions(Exception):
    """More unknown keys were shown than the API server is asked about; the same call may be repeated."""


@dataclass(frozen=True, slots=True)
class _Answer:
    record: KeyRecord | None
    until: float


class UnseenKeys:
    """Asks for the record of a key id, on behalf of callers whose key the watch's record does not fit."""

    def __init__(
        self, ask: Callable[[str], Awaitable[KeyRecord | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._asking: dict[str, asyncio.Task[KeyRecord | None]] = {}
        self._budget = float(BURST)
        self._counted = clock()

    async def find(self, key: str, key_id: str) -> KeyRecord | None:
        """The record that this key fits, as the API server has it; None if there is none.

        Raises TooManyQuestions, and what `ask` raises.
        """
        # By the whole key: a wrong one must not stand in the way of a right one with the same id.
        name = digest(key)
        known = self._answers.get(name)
        if known is not None and self._clock() < known.until:
            return known.record
        task = self._asking.get(name)
        if task is None:
            self._spend()
            task = asyncio.create_task(self._answer(name, key, key_id))
            self._asking[name] = task
            task.add_done_callback(lambda done: self._asked(name, done))
        # The caller may go away; the others wait for the same answer.
        return await asyncio.shield(task)

    def _asked(self, name: str, task: asyncio.Task[KeyRecord | None]) -> None:
        del self._asking[name]
        if not task.cancelled():
            task.exception()  # everybody who wanted to know may have gone

    async def _answer(self, name: str, key: str, key_id: str) -> KeyRecord | None:
        found = await self._ask(key_id)
        record = found if fits(key, found) else None
        seconds = MISSING_SECONDS if record is None else FOUND_SECONDS
        self._answers[name] = _Answer(record, self._clock() + seconds)
        self._answers.move_to_end(name)
        if len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return record

    def _spend(self) -> None:
        now = self._clock()
        self._budget = min(float(BURST), self._budget + (now - self._counted) * REQUESTS_PER_SECOND)
        self._counted = now
        if self._budget < 1.0:
            raise TooManyQuestions("too many unknown API keys at a time, try again")
        self._budget -= 1.0
