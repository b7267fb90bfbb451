"""Reads everything at the start and every few minutes: heals what the watch missed, and wakes every session."""

from __future__ import annotations

import asyncio
import random

import structlog

from .cache import Cache
from .ports import Cluster, ClusterError
from .work_queue import WorkQueue

log = structlog.get_logger()

PERIOD_SECONDS = 300.0
RETRY_SECONDS = 5.0


class Resync:
    """Replaces the cache wholesale."""

    def __init__(self, cluster: Cluster, cache: Cache, queue: WorkQueue) -> None:
        self._cluster = cluster
        self._cache = cache
        self._queue = queue
        self._succeeded = asyncio.get_running_loop().time()

    async def once(self) -> None:
        """Reads all lists. Raises ClusterError."""
        self._cache.begin_resync()
        # Nodes first: a pod must not be seen on a node that is not known yet.
        nodes = await self._cluster.list_nodes()
        pods = await self._cluster.list_pods()
        sessions = await self._cluster.list_sessions()
        for key in self._cache.replace(sessions=sessions, pods=pods, nodes=nodes):
            self._queue.add(key)
        self._succeeded = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Until cancelled; the first one is up to the caller."""
        wait = PERIOD_SECONDS
        while True:
            await asyncio.sleep(wait * random.uniform(0.9, 1.1))
            try:
                await self.once()
                wait = PERIOD_SECONDS
            except ClusterError as error:
                log.warning("resync failed", problem=str(error))
                wait = RETRY_SECONDS

    def age(self) -> float:
        """Seconds since the last success, or since the start."""
        return asyncio.get_running_loop().time() - self._succeeded
