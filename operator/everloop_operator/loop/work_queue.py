"""A queue of keys: each at most once waiting and at most once in work, with timers and a back-off per key."""

from __future__ import annotations

import asyncio
import random

from .ports import Key

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 15.0
"""What fails because the API server is away should not wait much longer than that."""


class WorkQueue:
    """A key that is added while it is in work is worked on once more afterwards, so no signal is ever lost."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: dict[Key, float] = {}
        self._working: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}

    def add(self, key: Key) -> None:
        """Asks for a pass now."""
        now = asyncio.get_running_loop().time()
        if key in self._working:
            self._again.setdefault(key, now)
        elif key not in self._waiting:
            self._waiting[key] = now
            self._ready.put_nowait(key)

    def schedule(self, key: Key, seconds: float | None) -> None:
        """Asks for a pass after so many seconds, instead of any that was asked for before; None: only on a signal."""
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()
        if seconds is not None:
            self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._due, key)

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def take(self) -> Key:
        """The next key; `done` or `failed` must follow."""
        key = await self._ready.get()
        del self._waiting[key]
        self._working.add(key)
        return key

    def done(self, key: Key) -> None:
        """The pass succeeded."""
        self._failures.pop(key, None)
        self._finish(key)

    def failed(self, key: Key) -> float:
        """The pass failed: asks for another after a growing delay, and returns that."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(count, 10), LONGEST_BACKOFF_SECONDS)
        delay *= random.uniform(0.75, 1.25)
        self._again.pop(key, None)  # a signal must not get around the back-off
        self._finish(key)
        self.schedule(key, delay)
        return delay

    def _finish(self, key: Key) -> None:
        self._working.discard(key)
        if self._again.pop(key, None) is not None:
            self.add(key)

    def depth(self) -> int:
        """How many keys wait."""
        return len(self._waiting)

    def oldest_wait(self) -> float:
        """Seconds for which the key that has waited longest has waited."""
        now = asyncio.get_running_loop().time()
        return now - min(self._waiting.values(), default=now)

    def close(self) -> None:
        """Stops the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
