"""The workers: take a key, run the pass of its kind, and see to it that a failed one is repeated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import structlog

from .metrics import RECONCILE_SECONDS
from .ports import ClusterError, Key
from .work_queue import WorkQueue

log = structlog.get_logger()

CONCURRENT_PASSES = 16

Pass = Callable[[Key], Awaitable[float | None]]
"""One pass over an object. Returns seconds after which the next is due without a signal, or None."""


class Worker:
    """Runs passes, several at a time but one at a time for a key."""

    def __init__(self, queue: WorkQueue, passes: Mapping[str, Pass]) -> None:
        """`passes` has one for each kind."""
        self._queue = queue
        self._passes = passes

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT_PASSES):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            about = {"kind": key.kind, "namespace": key.namespace, "name": key.name}
            started = time.monotonic()
            try:
                wait = await self._passes[key.kind](key)
            except ClusterError as error:
                _measure(key, "retry", started)
                delay = self._queue.failed(key)
                log.warning("retry", **about, problem=str(error), seconds=delay)
                continue
            except Exception:
                _measure(key, "defect", started)
                delay = self._queue.failed(key)
                log.exception("defect", **about, seconds=delay)
                continue
            _measure(key, "done", started)
            self._queue.schedule(key, wait)
            self._queue.done(key)


def _measure(key: Key, outcome: str, started: float) -> None:
    RECONCILE_SECONDS.labels(key.kind, outcome).observe(time.monotonic() - started)
