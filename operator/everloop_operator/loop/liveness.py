"""Whether this process still does its work: the answer to the kubelet's liveness probe."""

from __future__ import annotations

import asyncio

from .resync import PERIOD_SECONDS, Resync
from .work_queue import WorkQueue

LONGEST_LAG_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 600.0
TICK_SECONDS = 1.0


class Dead(Exception):
    """The process should be restarted; the message says why."""


class Liveness:
    """Judges by what the loop achieves, not by whether it runs."""

    def __init__(self, queue: WorkQueue, resync: Resync) -> None:
        self._queue = queue
        self._resync = resync
        self._lag = 0.0

    async def run(self) -> None:
        """Measures by how much the event loop is late; until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            asleep = loop.time()
            await asyncio.sleep(TICK_SECONDS)
            self._lag = loop.time() - asleep - TICK_SECONDS

    def check(self) -> None:
        """Raises Dead."""
        if self._lag > LONGEST_LAG_SECONDS:
            raise Dead(f"the event loop was late by {self._lag:.0f} s")
        if self._queue.oldest_wait() > LONGEST_WAIT_SECONDS:
            raise Dead(f"a session has waited for a pass for {self._queue.oldest_wait():.0f} s")
        if self._resync.age() > 3 * PERIOD_SECONDS:
            raise Dead(f"no complete list for {self._resync.age():.0f} s")
