"""How many GPUs a pod holds."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

RESOURCES = ("*/gpu", "nvidia.com/mig-*", "gpu.intel.com/*", "habana.ai/gaudi", "aws.amazon.com/neuron*")
"""Names of the resources that count as GPUs: each unit of them is one, a slice of a GPU as well."""


def held(pod_spec: Mapping[str, Any]) -> int:
    """Of all containers of a pod that run at a time, sidecars among them.

    Devices come in whole numbers. Thousands of them, which the API server writes as `1k`, are on no node.
    """
    return sum(
        int(amount) if str(amount).isdecimal() else 0
        for container in (*(pod_spec.get("containers") or ()), *_sidecars(pod_spec))
        for name, amount in ((container.get("resources") or {}).get("limits") or {}).items()
        if any(fnmatchcase(name, pattern) for pattern in RESOURCES)
    )


def _sidecars(pod_spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in pod_spec.get("initContainers") or () if each.get("restartPolicy") == "Always"]
