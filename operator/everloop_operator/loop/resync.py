"""Reads everything at the start, every few minutes and on demand: heals what the watch missed, and wakes everybody.

API keys of jobs that are gone are deleted on the way: no garbage collection reaches them in another namespace.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import structlog

from everloop_operator.api import names

from .cache import NODE_KIND, POD_KIND, Cache
from .ports import Cluster, ClusterError, Listed
from .work_queue import WorkQueue

log = structlog.get_logger()

PERIOD_SECONDS = 300.0
RETRY_SECONDS = 5.0
GATHERING_SECONDS = 1.0
"""How long after it is asked for one begins: the watches of all kinds are lost together, and one is enough."""


class Resync:
    """Takes over complete lists into the cache."""

    def __init__(self, cluster: Cluster, cache: Cache, queue: WorkQueue) -> None:
        self._cluster = cluster
        self._cache = cache
        self._queue = queue
        self._asked = asyncio.Event()
        self._succeeded = asyncio.get_running_loop().time()

    def soon(self) -> None:
        """A watch was interrupted, and may have missed something."""
        self._asked.set()

    async def once(self) -> None:
        """Reads all lists. Raises ClusterError."""
        before = self._cache.known()
        self._cache.begin_resync()
        # Nodes first: a pod must not be seen on a node that is not known yet.
        await self._read(NODE_KIND, self._cluster.list_nodes())
        await self._read(POD_KIND, self._cluster.list_pods())
        await self._read(names.TRAINING_SESSION_KIND, self._cluster.list_sessions())
        # Keys first: each is younger than its job, so one whose job is not listed afterwards has lost it.
        keys = await self._cluster.list_job_keys()
        uids = await self._read(names.RL_JOB_KIND, self._cluster.list_jobs())
        for key in before | self._cache.known():
            self._queue.add(key)
        for secret in keys.items:
            if secret["metadata"]["labels"][names.LABEL_JOB_UID] not in uids:
                await self._cluster.delete_secret(secret["metadata"]["namespace"], secret["metadata"]["name"])
        self._succeeded = asyncio.get_running_loop().time()

    async def _read(self, kind: str, pages: AsyncIterator[Listed]) -> set[str]:
        """Takes over a list page by page, so that none is held whole. Returns the UIDs in it."""
        there: set[str] = set()
        versions = []
        async for page in pages:
            there |= self._cache.take(kind, page)
            versions.append(page.version)
        # The oldest counts: what is newer is not said to be gone. Where nothing could be read, nothing is.
        self._cache.finish(kind, there, min(versions, default=0))
        return there

    async def run(self) -> None:
        """Until cancelled; the first one is up to the caller."""
        wait = PERIOD_SECONDS
        while True:
            await self._asked_or_due(wait * random.uniform(0.9, 1.1))
            try:
                await self.once()
                wait = PERIOD_SECONDS
            except ClusterError as error:
                log.warning("resync failed", problem=str(error))
                wait = RETRY_SECONDS

    async def _asked_or_due(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._asked.wait(), seconds)
        except TimeoutError:
            return
        await asyncio.sleep(GATHERING_SECONDS)
        self._asked.clear()

    def age(self) -> float:
        """Seconds since the last success, or since the start."""
        return asyncio.get_running_loop().time() - self._succeeded
