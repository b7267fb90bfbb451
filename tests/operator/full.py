"""TrainingSessions in which every field of the spec is set, and the places of its fields beside their schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everloop_operator.api import crd, names

Path = tuple[str | int, ...]
Schema = dict[str, Any]

AFFINITY_TERM: dict[str, Any] = {
    "labelSelector": {
        "matchLabels": {"app": "loader"},
        "matchExpressions": [{"key": "tier", "operator": "In", "values": ["a", "b"]}],
    },
    "topologyKey": "topology.kubernetes.io/zone",
    "namespaces": ["team"],
}
ENVIRONMENT: list[dict[str, Any]] = [
    {"name": "NCCL_DEBUG", "value": "WARN"},
    {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token", "optional": True}}},
    {"name": "REGION", "valueFrom": {"configMapKeyRef": {"name": "site", "key": "region", "optional": True}}},
    {"name": "TEAM", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['team']"}}},
]
OVERLAY: dict[str, Any] = {
    "labels": {"team": "poems"},
    "annotations": {"example.com/why": "because of this: that"},
    "serviceAccountName": "trainer",
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [
        {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"},
        {"key": "maintenance", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
    ],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]},
                    {
                        "matchExpressions": [
                            {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-x"]}
                        ]
                    },
                ]
            },
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 5,
                    "preference": {"matchExpressions": [{"key": "fast", "operator": "In", "values": ["yes"]}]},
                }
            ],
        },
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [AFFINITY_TERM],
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 3, "podAffinityTerm": AFFINITY_TERM}],
        },
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [AFFINITY_TERM],
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 3, "podAffinityTerm": AFFINITY_TERM}],
        },
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {
                "matchLabels": {"team": "poems"},
                "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["c"]}],
            },
        }
    ],
    "priorityClassName": "",
    "runtimeClassName": "nvidia",
    "schedulerName": "default-scheduler",
    "env": ENVIRONMENT,
    "volumes": [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {
            "name": "authorities",
            "configMap": {"name": "ca", "items": [{"key": "ca.pem", "path": "ca.pem"}], "optional": True},
        },
        {
            "name": "credentials",
            "secret": {
                "secretName": "s3",
                "items": [{"key": "key", "path": "keys/key"}],
                "optional": True,
                "defaultMode": 288,
            },
        },
        {"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        {
            "name": "cloud",
            "projected": {
                "sources": [
                    {"configMap": {"name": "ca", "items": [{"key": "ca.pem", "path": "ca.pem"}], "optional": True}},
                    {"secret": {"name": "s3", "items": [{"key": "key", "path": "keys/key"}], "optional": True}},
                    {"serviceAccountToken": {"audience": "sts.example.com", "expirationSeconds": 600, "path": "token"}},
                ],
                "defaultMode": 288,
            },
        },
        {
            "name": "vault",
            "csi": {
                "driver": "secrets-store.csi.k8s.io",
                "readOnly": True,
                "volumeAttributes": {"secretProviderClass": "poems"},
                "nodePublishSecretRef": {"name": "vault"},
            },
        },
    ],
    "volumeMounts": [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "authorities", "mountPath": "/etc/ssl/certs/own", "subPath": "ca.pem", "readOnly": True},
        {"name": "data", "mountPath": "/data"},
        {"name": "cloud", "mountPath": "/etc/cloud", "readOnly": True},
        {"name": "vault", "mountPath": "/etc/vault", "readOnly": True},
    ],
    "initContainers": [
        {
            "name": "warm-up",
            "image": "busybox:1",
            "command": ["sh", "-c"],
            "args": ["ls /data"],
            "env": ENVIRONMENT,
            "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}},
            "volumeMounts": [{"name": "data", "mountPath": "/data", "subPath": "sets", "readOnly": True}],
        },
        {"name": "shipper", "image": "busybox:1", "restartPolicy": "Always"},
    ],
    "securityContext": {"runAsUser": 2000, "fsGroup": 3000},
    "terminationGracePeriodSeconds": 300,
    "disruptionBudget": True,
}
FULL: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": names.TRAINING_SESSION_KIND,
    "metadata": {"name": "full"},
    "spec": {
        "baseModel": {
            "name": "base/model",
            "revision": "1",
            "source": {"claim": {"claimName": "models", "path": "base"}},
        },
        "image": "trainer:2",
        "engine": {
            "dtype": "BFloat16",
            "maxSequenceLength": 4096,
            "threads": 4,
            "images": {"maxBytes": 100_000, "maxPixels": 1_000_000},
        },
        "workers": {
            "resources": {
                "requests": {"cpu": 2, "memory": "8Gi", "nvidia.com/gpu": 1},
                "limits": {"memory": "8Gi", "nvidia.com/gpu": 1},
            }
        },
        "adapters": {"maxModels": 4, "maxRank": 16},
        "storage": {
            "journal": {"claim": {"claimName": "training", "subPath": "everloop"}},
            "copies": {
                "s3": {
                    "uri": "s3://team-poems/everloop",
                    "region": "us-west-2",
                    "kmsKeyId": "alias/everloop",
                    "endpointUrl": "https://s3.example.com",
                    "credentialsSecretName": "s3-copies",
                }
            },
            "modelCache": {"claim": {"claimName": "model-cache"}},
            "allowNodeLocal": True,
        },
        "snapshots": {"replayBudgetSeconds": 10},
        "checkpoints": {"everySeconds": 60, "keepLast": 3},
        "recovery": {
            "infrastructure": {"maxAttempts": 5, "windowSeconds": 600},
            "application": {"maxAttempts": 2, "windowSeconds": 600},
            "checkpointDeadlineSeconds": 20,
            "forceDeleteAfterSeconds": 60,
            "avoidSeconds": 600,
        },
        "idle": {"afterSeconds": 60, "onCall": "Refuse"},
        "suspend": False,
        "stop": False,
        "ttlSecondsAfterFinished": 3600,
        "deletion": {"waitForCopies": True, "deadlineSeconds": 60},
        "deadlines": {"startupSeconds": 600, "unschedulableSeconds": 600, "progressSeconds": 600},
        "pod": OVERLAY,
    },
}


CLAIM_TEMPLATE: dict[str, Any] = {
    "storageClassName": "fast",
    "accessModes": ["ReadWriteMany"],
    "size": "10Gi",
    "whenDeleted": "Delete",
}
WITH_TEMPLATE: dict[str, Any] = {
    **FULL,
    "spec": {**FULL["spec"], "storage": {**FULL["spec"]["storage"], "journal": {"claimTemplate": CLAIM_TEMPLATE}}},
}
HUB = {"repo": "org/small", "revision": "v1", "tokenSecretName": "hub"}
BUCKET = {
    "uri": "s3://models/small",
    "region": "us-west-2",
    "endpointUrl": "https://s3.example.com",
    "credentialsSecretName": "s3-models",
}


def _from(source: dict[str, Any]) -> dict[str, Any]:
    return {**FULL, "spec": {**FULL["spec"], "baseModel": {**FULL["spec"]["baseModel"], "source": source}}}


GOOD = (FULL, WITH_TEMPLATE, _from({"huggingFace": HUB}), _from({"s3": BUCKET}))
"""Between them they have every field."""


def schema(definition: Schema | None = None) -> Schema:
    """The schema of a TrainingSession, or of what is defined here."""
    version: Schema = (definition or crd.training_session_crd())["spec"]["versions"][0]
    result: Schema = version["schema"]["openAPIV3Schema"]
    return result


def places(node: Schema, value: Any, where: str = "", path: Path = ()) -> Iterator[tuple[str, Path, Schema, Any]]:
    """Every value with the name of its field, as in `fields.txt`, its path in the object, and its schema."""
    yield where, path, node, value
    if isinstance(value, dict):
        for key, child in value.items():
            if key in node.get("properties", {}):
                name = f"{where}.{key}" if where else key
                yield from places(node["properties"][key], child, name, (*path, key))
            elif "additionalProperties" in node:
                yield from places(node["additionalProperties"], child, f"{where}{{}}", (*path, key))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from places(node["items"], child, f"{where}[]", (*path, number))
