"""The pass over objects of a kind whose served schema is older than this operator: it changes nothing, and says so."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from everloop_operator.api import names
from everloop_operator.core.events import Event

from .cache import Cache
from .ports import Cluster, Key, Now

MOST_NAMED = 5

log = structlog.get_logger()


class ReadOnlyPass:
    """What the API server would prune from a status is what the next pass rests on: pods would be made or removed."""

    def __init__(self, cluster: Cluster, cache: Cache, kind: str, missing: Sequence[str], now: Now) -> None:
        self._cluster = cluster
        self._cache = cache
        self._now = now
        self._told: set[str] = set()
        shown = ", ".join(missing[:MOST_NAMED]) + (" and others" if len(missing) > MOST_NAMED else "")
        self._message = (
            f"the CustomResourceDefinition of {kind} is older than the operator and lacks {shown}: nothing is changed "
            "until it is updated"
        )
        log.error("read-only", kind=kind, problem=self._message)

    async def reconcile(self, key: Key) -> float | None:
        """Tells it once of each object. Raises ClusterError."""
        body = self._cache.get(key)
        if body is not None and body["metadata"]["uid"] not in self._told:
            event = Event("Warning", names.EVENT_SCHEMA_OUTDATED, self._message, "schema")
            await self._cluster.post_event(body, event, self._now())
            self._told.add(body["metadata"]["uid"])
        return None
