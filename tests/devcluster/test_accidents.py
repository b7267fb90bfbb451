"""What happens to nodes and components: kill, partition, heal, add, remove, and supervision."""

from __future__ import annotations

import pytest

from devcluster.cluster import Cluster
from devcluster.settings import ClusterError
from tests.devcluster import manifests
from tests.devcluster.user import User, answers, fetch, wait_for

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("component", ["kubelet-node-a", "cri-node-a"])
def test_containers_outlive_kubelet_and_runtime(component: str, cluster: Cluster) -> None:
    """A kubelet or runtime that is killed comes back and finds its containers as they were."""
    user = User(cluster, "default")
    address = user.run(manifests.server(f"on-{component}", node="node-a"))
    pids = cluster.container_pids(f"on-{component}")
    _kill_and_wait(cluster, component)
    assert fetch(f"{address}:8080").strip() == f"on-{component}"
    user.run(manifests.server(f"after-{component}", node="node-a"))  # the node takes new pods
    assert cluster.container_pids(f"on-{component}") == pids
    status = user.get("pod", f"on-{component}")["status"]["containerStatuses"][0]
    assert status["restartCount"] == 0
    user.kubectl("delete", "pods", "--all", "--now", "--wait=false")


def _kill_and_wait(cluster: Cluster, component: str) -> None:
    before = cluster.component(component)
    assert before is not None
    before.kill()
    wait_for(lambda: cluster.component(component) not in (None, before), f"{component} to come back")


def test_control_plane_comes_back(cluster: Cluster, user: User) -> None:
    """After every component of the control plane was killed pods are run as before."""
    components = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "cri-streaming", "agent")
    for component in components:
        _kill_and_wait(cluster, component)
    wait_for(lambda: cluster.is_node_ready("node-a"), "the API server")
    user.run(manifests.server("web"))
    assert user.kubectl("exec", "web", "--", "id", "-u").strip() == "1000"


def test_partitioned_node_is_not_ready_while_its_pod_answers(cluster: Cluster, user: User) -> None:
    """A partitioned node becomes NotReady, its pod lives on; after healing it is Ready with the same process."""
    address = user.run(manifests.server("zombie", node="node-b"))
    pids = cluster.container_pids("zombie", user.namespace)
    cluster.node_partition("node-b")
    try:
        assert cluster.wait_node("node-b", ready=False, seconds=20) < 15
        assert cluster.component("kubelet-node-b") is None
        assert fetch(f"{address}:8080").strip() == "zombie"
        assert cluster.container_pids("zombie", user.namespace) == pids
    finally:
        cluster.node_heal("node-b")
    cluster.wait_node("node-b", ready=True)


def test_killed_node_is_not_ready_and_nothing_of_it_lives(cluster: Cluster, user: User) -> None:
    """A node that lost its power becomes NotReady, nothing of it runs; after healing it has booted anew."""
    memory = {"volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}]}
    pod = manifests.server("victim", node="node-c", **memory)
    pod["spec"]["restartPolicy"] = "Always"
    pod["spec"]["tolerations"] = [{"operator": "Exists", "effect": "NoExecute"}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "memory", "mountPath": "/memory"}]
    address = user.run(pod)
    user.kubectl("exec", "victim", "--", "touch", "/memory/file")
    boot = _boot_id(cluster, "node-c")
    cluster.node_kill("node-c")
    try:
        assert not answers(f"{address}:8080")
        assert cluster.container_pids("victim", user.namespace) == []
        assert cluster.component("cri-node-c") is None
        assert cluster.wait_node("node-c", ready=False, seconds=20) < 15
    finally:
        cluster.node_heal("node-c")
    cluster.wait_node("node-c", ready=True)
    assert _boot_id(cluster, "node-c") != boot
    wait_for(lambda: bool(cluster.container_pids("victim", user.namespace)), "the pod to be started again")
    wait_for(lambda: _restarts(user, "victim") == 1, "the restart in the pod's status")
    assert user.kubectl("exec", "victim", "--", "ls", "/memory") == ""


def _boot_id(cluster: Cluster, node: str) -> str:
    return str(cluster.api.get(f"/api/v1/nodes/{node}")["status"]["nodeInfo"]["bootID"])


def _restarts(user: User, pod: str) -> int:
    return int(user.get("pod", pod)["status"]["containerStatuses"][0]["restartCount"])


def test_node_joins_and_leaves(cluster: Cluster, user: User) -> None:
    """A new node joins and runs pods; removed, it is gone from the API and from the machine."""
    cluster.node_add("extra", gpus=1)
    cluster.wait_node("extra", ready=True)
    address = user.run(manifests.server("guest", node="extra"))
    assert address.startswith(cluster.settings.nodes["extra"].prefix)
    with pytest.raises(ClusterError, match="'extra'"):
        cluster.node_add("extra")
    cluster.node_remove("extra")
    assert not answers(f"{address}:8080")
    assert "extra" not in cluster.kubectl("get", "nodes", "--output=name")
    assert not cluster.layout.node("extra").exists()
    with pytest.raises(ClusterError, match="'extra'"):
        cluster.node_heal("extra")
