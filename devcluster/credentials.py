"""Keys, certificates, tokens and kubeconfigs of a cluster."""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path
from typing import Any

from devcluster.settings import ClusterError, Layout, Settings, write_private

API_SERVER_NAMES = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]


def create(layout: Layout, settings: Settings) -> None:
    """Make everything the control plane needs. All files can be read by their owner only."""
    layout.pki.mkdir(parents=True, mode=0o700)
    _issue(
        layout,
        settings,
        _request(
            "apiserver",
            "kube-apiserver",
            dnsNames=[*API_SERVER_NAMES, "kubernetes.default.svc.cluster.local"],
            ipAddresses=["127.0.0.1", f"127.{settings.service_octet}.0.1"],
        ),
        _request("kubelet-client", "kube-apiserver-kubelet-client", organization=["system:masters"]),
        _request("etcd", "etcd", dnsNames=["localhost"], ipAddresses=["127.0.0.1"]),
        _request("controller-manager", "system:kube-controller-manager"),
        _request("scheduler", "system:kube-scheduler"),
    )
    token = secrets.token_urlsafe(32)
    write_private(layout.pki / "tokens.csv", f'{token},admin,1,"system:masters"\n')
    write_kubeconfig(layout.kubeconfig, layout, settings, {"token": token})
    for name in ("controller-manager", "scheduler"):
        _write_certificate_kubeconfig(layout.pki / f"{name}.kubeconfig", layout, settings, name)


def create_for_node(layout: Layout, settings: Settings, name: str) -> None:
    """Make what a node's kubelet needs, as server and as client."""
    node = _request(
        f"node-{name}",
        f"system:node:{name}",
        organization=["system:nodes"],
        dnsNames=[name],
        ipAddresses=[settings.nodes[name].address],
    )
    _issue(layout, settings, node)
    _write_certificate_kubeconfig(layout.node(name) / "kubeconfig", layout, settings, f"node-{name}")


def _write_certificate_kubeconfig(path: Path, layout: Layout, settings: Settings, name: str) -> None:
    files = {"client-certificate": layout.pki / f"{name}.crt", "client-key": layout.pki / f"{name}.key"}
    write_kubeconfig(path, layout, settings, {key: str(value) for key, value in files.items()})


def write_kubeconfig(path: Path, layout: Layout, settings: Settings, user: dict[str, str]) -> None:
    """Write a kubeconfig for the API server with the user's credentials."""
    cluster = {"server": settings.server, "certificate-authority": str(layout.pki / "ca.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "devcluster", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": "user"}}],
        "current-context": "devcluster",
    }
    write_private(path, json.dumps(config, indent=1))


def _request(name: str, common_name: str, **extra: list[str]) -> dict[str, Any]:
    return {"name": name, "commonName": common_name, **extra}


def _issue(layout: Layout, settings: Settings, *requests: dict[str, Any]) -> None:
    command = [f"{settings.kube}/kube", "pki", str(layout.pki)]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"certificates: {done.stderr.strip()}")
