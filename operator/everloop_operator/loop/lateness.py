"""How much time the event loop of this process has lost: measured by a sleeper, which wakes late if all else does."""

from __future__ import annotations

import asyncio

TICK_SECONDS = 0.1


class Lateness:
    """Counts the seconds by which a sleeper woke too late."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._due: float | None = None

    async def run(self) -> None:
        """Measures until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._due = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._seconds += max(0.0, loop.time() - self._due)

    def seconds(self) -> float:
        """All that was lost so far. What has just been lost is in it, whether or not the sleeper ran first."""
        overdue = asyncio.get_running_loop().time() - self._due if self._due is not None else 0.0
        return self._seconds + max(0.0, overdue)
