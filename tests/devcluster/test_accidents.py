"""What happens to nodes and components: kill, partition, heal, freeze, thaw, add, remove, and supervision."""

from __future__ import annotations

import socket

import pytest

from devcluster.cluster import Cluster
from devcluster.processes import is_stopped, marked
from devcluster.settings import ClusterError, NodeState
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


def test_frozen_node_is_not_ready_and_goes_on_as_if_nothing_had_been(cluster: Cluster, user: User) -> None:
    """Connections to a frozen node are taken and not answered; thawed, the pod that may stay is the same process."""
    stays = manifests.server("stays", node="node-a")
    stays["spec"]["tolerations"] = [{"operator": "Exists", "effect": "NoExecute"}]
    address = user.run(stays)
    pids, boot = cluster.container_pids("stays", user.namespace), _boot_id(cluster, "node-a")
    cluster.node_freeze("node-a")
    try:
        frozen = _of_node(cluster)
        assert set(pids) < set(frozen)
        assert all(is_stopped(pid) for pid in frozen)
        assert cluster.wait_node("node-a", ready=False, seconds=20) < 15
        with socket.create_connection((address, 8080), timeout=2) as connection:
            connection.sendall(b"GET /hostname HTTP/1.0\r\n\r\n")
            with pytest.raises(TimeoutError):
                connection.recv(1)
            assert _of_node(cluster) == frozen, "nothing ended, nothing was started"
            cluster.node_thaw("node-a")
            connection.settimeout(20)
            assert connection.recv(8) == b"HTTP/1.0", "what was sent to a frozen server is answered after all"
    finally:
        if cluster.settings.nodes["node-a"].state == NodeState.FROZEN:
            cluster.node_thaw("node-a")
    cluster.wait_node("node-a", ready=True)
    assert cluster.container_pids("stays", user.namespace) == pids
    assert _restarts(user, "stays") == 0
    assert _boot_id(cluster, "node-a") == boot


def test_thawed_kubelet_ends_what_was_deleted_meanwhile(cluster: Cluster, user: User) -> None:
    """A pod deleted by force while its node was frozen is a living zombie after the thaw until the kubelet ends it."""
    user.run(manifests.server("deleted", node="node-b"))
    uid = user.get("pod", "deleted")["metadata"]["uid"]
    cluster.node_freeze("node-b")
    try:
        cluster.wait_node("node-b", ready=False)
        user.kubectl("delete", "pod", "deleted", "--grace-period=0", "--force")
        assert cluster.container_pids(uid)
    finally:
        cluster.node_thaw("node-b")
    cluster.wait_node("node-b", ready=True)
    wait_for(lambda: cluster.container_pids(uid) == [], "the kubelet to end the deleted pod")


def test_frozen_node_may_be_killed(cluster: Cluster, user: User) -> None:
    """A frozen node is neither partitioned, healed nor frozen again; switched off, nothing of it is left."""
    cluster.node_freeze("node-c")
    try:
        for refused in (cluster.node_partition, cluster.node_heal, cluster.node_freeze):
            with pytest.raises(ClusterError, match=r"'node-c'.*frozen"):
                refused("node-c")
        cluster.node_kill("node-c")
        assert _of_node(cluster, "node-c") == []
        with pytest.raises(ClusterError, match=r"'node-c'.*off, not frozen"):
            cluster.node_thaw("node-c")
    finally:
        cluster.node_heal("node-c")
    cluster.wait_node("node-c", ready=True)
    user.run(manifests.server("after", node="node-c"))


def _of_node(cluster: Cluster, node: str = "node-a") -> list[int]:
    return sorted(process.pid for process in marked(cluster.root, node))


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
