"""Reads everything at the start and every few minutes: heals what the watch missed, and wakes everybody.

API keys of jobs that are gone are deleted on the way: no garbage collection reaches them in another namespace.
"""

from __future__ import annotations

import asyncio
import random

import structlog

from everloop_operator.api import names

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
        # Keys first: each is younger than its job, so one whose job is not listed afterwards has lost it.
        keys = await self._cluster.list_job_keys()
        jobs = await self._cluster.list_jobs()
        for key in self._cache.replace(sessions=sessions, jobs=jobs, pods=pods, nodes=nodes):
            self._queue.add(key)
        uids = {body["metadata"]["uid"] for body in jobs.items}
        for secret in keys.items:
            if secret["metadata"]["labels"][names.LABEL_JOB_UID] not in uids:
                await self._cluster.delete_secret(secret["metadata"]["namespace"], secret["metadata"]["name"])
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
