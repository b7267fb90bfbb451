"""Writing statuses: only what changed, and seldom what nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from everloop_operator.core import interruptions, status

from . import metrics
from .cache import Cache
from .ports import Body, Cluster, Key


class StatusWriter:
    """Remembers when it last wrote each status."""

    def __init__(self, cluster: Cluster, cache: Cache, wake: Callable[[Key], None]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._wake = wake
        self._written: dict[Key, float] = {}

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._written.pop(key, None)

    async def write(
        self, key: Key, body: Body, before: Mapping[str, Any], after: Mapping[str, Any], *, urgent: bool
    ) -> float | None:
        """Writes the status. Returns seconds after which a write that was put off is due, or None.

        Args:
            key: the object.
            body: the object as read.
            before: its status as it would be written.
            after: the status to be.
            urgent: whether somebody waits for what changed.

        Raises:
            ClusterError: it could not be written.
        """
        if body.get("status") is not None and before == after:
            return None
        clock = asyncio.get_running_loop().time()
        due = self._written.get(key, clock - status.SECONDS_BETWEEN_WRITES) + status.SECONDS_BETWEEN_WRITES
        if not urgent and clock < due:
            return due - clock
        written = await self._cluster.write_status(body, after)
        self._written[key] = clock
        # The watch will show nothing new: whoever depends on this object hears of it here.
        for other in self._cache.put(written) - {key}:
            self._wake(other)
        metrics.count(key.kind, interruptions.between(before, after))
        return None
