"""Plays the cloud provider: gives new nodes their loopback address.

A kubelet refuses a loopback --node-ip. With --cloud-provider=external it leaves status.addresses alone and taints the
node until somebody has set them.
"""

from __future__ import annotations

from typing import Any

from devcluster.api import MERGE_PATCH, STRATEGIC_MERGE_PATCH, ApiClient
from devcluster.settings import Node

TAINT = "node.cloudprovider.kubernetes.io/uninitialized"


def initialize(api: ApiClient, objects: dict[str, dict[str, Any]], nodes: dict[str, Node]) -> None:
    """Set the addresses of all Node objects that still have the taint, and take it from them."""
    for item in objects.values():
        name, taints = item["metadata"]["name"], item["spec"].get("taints", [])
        if name not in nodes or all(t["key"] != TAINT for t in taints):
            continue
        addresses = [
            {"type": "InternalIP", "address": nodes[name].address},
            {"type": "Hostname", "address": name},
        ]
        url = f"/api/v1/nodes/{name}"
        api.request("PATCH", f"{url}/status", {"status": {"addresses": addresses}}, STRATEGIC_MERGE_PATCH)
        # The version makes the server refuse to drop a taint that somebody added meanwhile.
        current = api.get(url)
        left = [t for t in current["spec"].get("taints", []) if t["key"] != TAINT]
        version = current["metadata"]["resourceVersion"]
        api.request("PATCH", url, {"metadata": {"resourceVersion": version}, "spec": {"taints": left}}, MERGE_PATCH)
