"""Pods and what else the tests put into a cluster."""

from __future__ import annotations

from typing import Any

SERVER = "exec python3 -S -m http.server 8080 --bind $POD_IP --directory /etc"


def pod(name: str, command: str, *, node: str = "", **spec: Any) -> dict[str, Any]:
    """A pod as the restricted Pod Security Standard wants it: uid 1000, nothing writable, no capabilities."""
    container = {
        "name": "main",
        "image": "python:test",
        "command": ["sh", "-c", command],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            **({"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}),
            **spec,
        },
    }


def server(name: str, *, node: str = "", **spec: Any) -> dict[str, Any]:
    """A pod that serves /etc on port 8080, Ready once it answers."""
    container = {
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    }
    return pod(name, SERVER, node=node, container=container, **spec)


def service(name: str, app: str, target: int | str) -> dict[str, Any]:
    """A Service on port 80 before the pods of `app`."""
    spec = {"selector": {"app": app}, "ports": [{"port": 80, "targetPort": target}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def volume(name: str, path: str) -> list[dict[str, Any]]:
    """A directory of the machine as PersistentVolume and claim, the same on all nodes."""
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    common = {"accessModes": modes, "storageClassName": ""}
    pv = {**common, "capacity": size, "hostPath": {"path": path, "type": "Directory"}}
    claim = {**common, "volumeName": name, "resources": {"requests": size}}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": pv},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim},
    ]
