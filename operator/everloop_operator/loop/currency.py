"""Whether a pass may act on what it has read: an operator that was frozen wakes up with a view of the world gone by."""

from __future__ import annotations

from .cache import Cache
from .ports import Body, Cluster


async def is_current(cluster: Cluster, cache: Cache, body: Body) -> bool:
    """Whether an object is at the API server as it was read as `body`; if not, the cache has it as it is.

    Statuses are written by version, but a pod that is made or deleted has none: where the node of an operator comes
    back after another one has taken over, it would replace an attempt that the status has long left behind.

    Raises:
        ClusterError: it could not be read; Absent if it is gone.
    """
    found = await cluster.latest(body)
    if found["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]:
        return True
    cache.put(found)
    return False
