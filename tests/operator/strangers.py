"""Another operator in the same cluster, built with the same framework, that wants all of its kind to pause."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.operator.world import Api, eventually

GROUP = "kopf.dev"
PEERINGS = f"/apis/{GROUP}/v1/clusterkopfpeerings"
KIND = {"apiVersion": f"{GROUP}/v1", "kind": "ClusterKopfPeering"}
DEFINITION: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"clusterkopfpeerings.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Cluster",
        "names": {"kind": "ClusterKopfPeering", "plural": "clusterkopfpeerings", "singular": "clusterkopfpeering"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                },
            }
        ],
    },
}
"""As the documentation of kopf has it."""


RBAC = "/apis/rbac.authorization.k8s.io/v1"
GROUPS = "rbac.authorization.k8s.io"


def pause(api: Api) -> None:
    """The default peering object has a peer of higher priority, and will for the next hour.

    Everybody may read and write it, as operators that heed it must.
    """
    rule = {"apiGroups": [GROUP], "resources": ["*"], "verbs": ["*"]}
    api.create(f"{RBAC}/clusterroles", {"metadata": {"name": "peers"}, "rules": [rule]})
    binding = {
        "metadata": {"name": "peers"},
        "roleRef": {"kind": "ClusterRole", "name": "peers", "apiGroup": GROUPS},
        "subjects": [{"kind": "Group", "name": "system:authenticated", "apiGroup": GROUPS}],
    }
    api.create(f"{RBAC}/clusterrolebindings", binding)
    api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", DEFINITION)
    peer = {"priority": 1000, "lifetime": 3600, "lastseen": datetime.now(UTC).isoformat()}
    body = {"metadata": {"name": "default"}, "status": {"someone@elsewhere": peer}}
    eventually("the peering object", lambda: api.request("POST", PEERINGS, {**KIND, **body}).status_code == 201)
