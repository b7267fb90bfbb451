"""Who may do what: no port and no key is open to everybody."""

from __future__ import annotations

import http.client
import ssl

import pytest

from devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster


def _status(cluster: Cluster, address: str, port: int, path: str) -> int:
    """Status of a request without credentials."""
    trust = ssl.create_default_context(cafile=cluster.layout.pki / "ca.crt")
    connection = http.client.HTTPSConnection(address, port, context=trust, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_servers_refuse_strangers(cluster: Cluster) -> None:
    """Kubelet, API server and etcd have certificates of the cluster's authority and want credentials."""
    settings = cluster.settings
    assert _status(cluster, settings.nodes["node-a"].address, 10250, "/pods") == 401
    assert _status(cluster, "127.0.0.1", settings.ports["kube-apiserver"], "/api/v1/secrets") == 403
    for name in ("etcd", "etcd-peer"):
        with pytest.raises(OSError, match=r"(?i)certificate required|reset|eof"):
            _status(cluster, "127.0.0.1", settings.ports[name], "/version")


def test_keys_are_their_owners_alone(cluster: Cluster) -> None:
    """Nobody else can read a key or a kubeconfig."""
    layout = cluster.layout
    secrets = [layout.kubeconfig, *layout.pki.glob("*.key"), *layout.pki.glob("tokens.csv")]
    secrets += [*layout.pki.glob("*.kubeconfig"), *(layout.root / "nodes").glob("*/kubeconfig")]
    assert len(secrets) > 10
    for path in secrets:
        assert path.stat().st_mode & 0o077 == 0, path
