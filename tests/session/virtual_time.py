"""An event loop without a clock and without threads: the same seed gives the same run, to the last step.

Time jumps to the next thing that is due. What code hands to a thread happens at a drawn moment, and is known of at a
drawn moment after that, so that every order of effects comes up that threads could bring about.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST = 0.002
"""Seconds that work on a thread takes at most; as long again until the loop knows."""


class _Jump(selectors.SelectSelector):
    """Waits for nothing: moves the clock on instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is due: it would hang for ever")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. `chance` draws the moments."""

    def __init__(self, chance: random.Random) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._chance = chance
        self._free: dict[Executor, float] = {}

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(  # type: ignore[override] # typeshed has a wider first parameter
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Work of one executor happens one after another; other work in any order."""
        future: asyncio.Future[T] = self.create_future()
        at = self.time() + self._chance.uniform(0, LONGEST)
        if executor is not None:
            at = self._free[executor] = max(at, self._free.get(executor, 0.0) + 1e-6)

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                self.call_later(self._chance.uniform(0, LONGEST), fail, error)
            else:
                self.call_later(self._chance.uniform(0, LONGEST), succeed, result)

        def succeed(result: T) -> None:
            if not future.done():
                future.set_result(result)

        def fail(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        self.call_at(at, work)
        return future
