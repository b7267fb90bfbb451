"""How long Kubernetes leaves a pod on a lost node."""

from __future__ import annotations

import math
from typing import Any

from everloop_operator.api.placement import LOST_NODE_TAINTS


def evicted_after(node_lost_seconds: float, *, nodes_watched: bool) -> int | None:
    """Seconds on a lost node after which Kubernetes is to evict a pod; None for never.

    Where the operator sees nodes it alone decides when a pod is lost: an eviction would only delete the evidence.
    """
    return None if nodes_watched else math.ceil(node_lost_seconds)


def tolerations(seconds: int | None) -> list[dict[str, Any]]:
    """Tolerations of a pod that is evicted after so many seconds, or never."""
    limit = {} if seconds is None else {"tolerationSeconds": seconds}
    return [{"key": taint, "operator": "Exists", "effect": "NoExecute", **limit} for taint in LOST_NODE_TAINTS]
