"""A cluster in a few lines of text: its nodes and its processes."""

from __future__ import annotations

import http.client
from collections import Counter
from collections.abc import Sequence
from typing import Any

from devcluster.api import ApiError
from devcluster.cluster import Cluster
from devcluster.components import components


def describe(cluster: Cluster) -> str:
    """Return nodes with what they are meant to be and what the control plane thinks, and all processes."""
    settings = cluster.settings
    if settings.stopping:
        return "down"
    try:
        nodes = {item["metadata"]["name"]: item for item in cluster.api.get("/api/v1/nodes")["items"]}
        pods = Counter(item["spec"].get("nodeName") for item in cluster.api.get("/api/v1/pods")["items"])
        trouble = []
    except (OSError, http.client.HTTPException, ApiError) as e:
        nodes, pods, trouble = {}, Counter(), [f"API server: {e}"]
    rows = [("NODE", "STATE", "READY", "ADDRESS", "GPUS", "PODS")]
    for name, node in settings.nodes.items():
        ready = _ready(nodes[name]) if name in nodes else "-"
        rows.append((name, node.state.value, ready, node.address, str(node.gpus), str(pods[name])))
    processes = [("PROCESS", "PID")]
    for name in ["supervisor", *(component.name for component in components(cluster.layout, settings))]:
        process = cluster.component(name)
        processes.append((name, str(process.pid) if process else "not running"))
    return "\n".join([f"API server {settings.server}", *trouble, "", *_table(rows), "", *_table(processes)])


def _ready(node: dict[str, Any]) -> str:
    conditions = node["status"].get("conditions", [])
    return next((str(c["status"]) for c in conditions if c["type"] == "Ready"), "Unknown")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
