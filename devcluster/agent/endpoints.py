"""Where the ports of Services lead: decided from Services and pods alone.

The API server accepts no endpoints in 127.0.0.0/8, so EndpointSlices can't say it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Address = tuple[str, int]
Objects = dict[str, dict[str, Any]]


def routes(services: Objects, pods: Objects, api_server: Address) -> dict[Address, list[Address]]:
    """Return the addresses behind every TCP address of a Service, sorted.

    Args:
        services: Service objects.
        pods: Pod objects.
        api_server: what the Service ``kubernetes``, which has no selector, leads to.
    """
    table: dict[Address, list[Address]] = {}
    for key, service in services.items():
        spec = service["spec"]
        ip = spec.get("clusterIP", "")
        if ip in ("", "None"):
            continue
        for port in spec.get("ports", []):
            if port.get("protocol", "TCP") != "TCP":
                continue
            if key == "default/kubernetes":
                table[ip, port["port"]] = [api_server]
            elif spec.get("selector"):
                backends = _backends(service, pods.values(), port.get("targetPort", port["port"]))
                table[ip, port["port"]] = sorted(backends)
    return table


def named_services(services: Objects) -> list[dict[str, str]]:
    """Return name, namespace and ip of every Service that has an address."""
    found = []
    for service in services.values():
        ip = service["spec"].get("clusterIP", "")
        if ip not in ("", "None"):
            metadata = service["metadata"]
            found.append({"name": metadata["name"], "namespace": metadata["namespace"], "ip": ip})
    return sorted(found, key=lambda s: (s["namespace"], s["name"]))


def _backends(service: dict[str, Any], pods: Iterable[dict[str, Any]], target: int | str) -> Iterable[Address]:
    namespace, spec = service["metadata"]["namespace"], service["spec"]
    for pod in pods:
        labels = pod["metadata"].get("labels", {})
        if pod["metadata"]["namespace"] != namespace or any(labels.get(k) != v for k, v in spec["selector"].items()):
            continue
        ip, port = pod.get("status", {}).get("podIP"), _port_number(pod, target)
        if ip and port and (_is_ready(pod) or spec.get("publishNotReadyAddresses")):
            yield ip, port


def _port_number(pod: dict[str, Any], target: int | str) -> int | None:
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            if port.get("name") == target:
                return int(port["containerPort"])
    return None


def _is_ready(pod: dict[str, Any]) -> bool:
    if pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
