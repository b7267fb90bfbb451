"""Whether a pass may act on what it has read: an operator that was frozen wakes up with a view of the world gone by."""

from __future__ import annotations

from .cache import Cache
from .ports import Absent, Body, Cluster, Key


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


async def look_up(cluster: Cluster, cache: Cache, key: Key, pod: str, node: str) -> None:
    """Read live what the cache lacks, because a lack means a new attempt.

    Args:
        cluster: where.
        cache: what is found goes into it.
        key: the object.
        pod: name of the pod that it should have and the cache lacks; '' for none.
        node: the node that its status names; '' for none. Those of its pods are looked up as well.

    Raises:
        ClusterError: something could not be read.
    """
    if pod:
        try:
            cache.put_pod(await cluster.pod(key.namespace, pod))
        except Absent:
            pass
    if not cache.nodes_watched:
        return
    wanted = {item.pod.node for item in cache.pods(key)} | {node}
    for name in wanted - cache.nodes().keys() - {""}:
        try:
            cache.put_node(await cluster.node(name))
        except Absent:
            continue
