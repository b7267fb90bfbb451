"""What runs in a cluster: pods, Services, volumes, GPUs, in-cluster clients."""

from __future__ import annotations

import os
import signal

import pytest

from devcluster.cluster import Cluster
from devcluster.settings import ClusterError
from devcluster.status import describe
from tests.devcluster import manifests
from tests.devcluster.user import User, answers, fetch, wait_for

pytestmark = pytest.mark.cluster

IN_CLUSTER = """
import ssl, urllib.request
from kubernetes import client, config
config.load_incluster_config()
configuration = client.Configuration.get_default_copy()
assert configuration.verify_ssl and configuration.ssl_ca_cert
print("pods:", len(client.CoreV1Api().list_namespaced_pod(NAMESPACE).items))
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
trust = ssl.create_default_context(cafile=account + "ca.crt")
bearer = {"Authorization": "Bearer " + open(account + "token").read()}
request = urllib.request.Request("https://kubernetes.default.svc/version", headers=bearer)
print("by its name:", urllib.request.urlopen(request, context=trust, timeout=5).status)
"""


def test_three_nodes_are_ready(cluster: Cluster) -> None:
    """All nodes are Ready with their GPUs, and every component has a process."""
    assert list(cluster.settings.nodes) == ["node-a", "node-b", "node-c"]
    for name in cluster.settings.nodes:
        assert cluster.is_node_ready(name)
        wait_for(lambda n=name: _gpus(cluster, n) == "4", f"GPUs of {name}")  # type: ignore[misc]
    text = describe(cluster)
    assert text.count(" up ") == 3
    assert "not running" not in text


def _gpus(cluster: Cluster, node: str) -> str:
    return str(cluster.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"].get("nvidia.com/gpu"))


def test_restricted_pod_answers_on_its_address(user: User) -> None:
    """A pod as uid 1000 with a read-only root serves on POD_IP; logs and exec work; the cluster's keys are hidden."""
    address = user.run(manifests.server("web"))
    assert address.startswith("127.")
    assert fetch(f"{address}:8080").strip() == "web"
    assert user.kubectl("exec", "web", "--", "id", "-u").strip() == "1000"
    assert user.kubectl("exec", "web", "--", "sh", "-c", "echo $IMAGE").strip() == "python"
    with pytest.raises(ClusterError, match="Read-only file system"):
        user.kubectl("exec", "web", "--", "touch", "/x")
    assert user.kubectl("exec", "web", "--", "ls", str(user.cluster.root)) == ""
    wait_for(lambda: "GET /hostname" in user.kubectl("logs", "web"), "the request in the log")


def test_volumes_of_a_read_only_root_are_writable(user: User) -> None:
    """With a read-only root an emptyDir can be written, also at /tmp, beside it and inside another volume."""
    paths = ["/tmp", "/run/everloop", "/tmp/inner"]
    names = [f"v{i}" for i in range(len(paths))]
    mounts = [{"name": name, "mountPath": path} for name, path in zip(names, paths, strict=True)]
    command = "".join(f"echo {path} > {path}/file; " for path in paths) + f"cat {' '.join(f'{p}/file' for p in paths)}"
    volumes = [{"name": name, "emptyDir": {}} for name in names]
    text = user.result(manifests.pod("writer", command, volumes=volumes, container={"volumeMounts": mounts}))
    assert text.split() == paths


def test_images(user: User) -> None:
    """An image's entry point and command run; one that is missing can't be pulled."""
    greeter = manifests.pod("greeter", "")
    greeter["spec"]["containers"][0] |= {"image": "greeter:1"}
    del greeter["spec"]["containers"][0]["command"]
    assert user.result(greeter) == "hello world\n"
    missing = manifests.pod("missing", "true")
    missing["spec"]["containers"][0]["image"] = "missing:1"
    user.apply(missing)
    wait_for(lambda: "manifest unknown" in user.kubectl("describe", "pod", "missing"), "the pull error")


def test_service_leads_to_ready_pods(user: User) -> None:
    """A Service answers on its ClusterIP through a named port, in turn from its pods, and is gone when deleted."""
    first, second = manifests.server("one"), manifests.server("two")
    for pod in (first, second):
        pod["metadata"]["labels"]["app"] = "both"
    user.apply(manifests.service("both", "both", "http"), first)
    user.run(second)
    ip = user.get("service", "both")["spec"]["clusterIP"]
    wait_for(lambda: {fetch(ip).strip() for _ in range(4)} == {"one", "two"} if answers(ip) else False, "both pods")
    user.kubectl("delete", "pod", "one")
    wait_for(lambda: {fetch(ip).strip() for _ in range(4)} == {"two"}, "the pod that is left")
    user.kubectl("delete", "service", "both")
    wait_for(lambda: not answers(ip), "the address to be free")


def test_in_cluster_client_verifies_tls(user: User) -> None:
    """A client in a pod reaches the API server by address and by name, and trusts it by the mounted authority."""
    user.kubectl("create", "rolebinding", "view", "--clusterrole=view", f"--serviceaccount={user.namespace}:default")
    script = IN_CLUSTER.replace("NAMESPACE", repr(user.namespace))
    pod = manifests.pod("client", "")
    pod["spec"]["containers"][0]["command"] = ["python", "-c", script]
    assert user.result(pod) == "pods: 1\nby its name: 200\n"


def test_gpus_are_counted(user: User) -> None:
    """One GPU is given to a pod, which sees which; nobody has 99."""
    limits = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    text = user.result(manifests.pod("one", "echo GPU $CUDA_VISIBLE_DEVICES", container=limits))
    assert text.strip() in {f"GPU {i}" for i in range(4)}
    limits["resources"]["limits"]["nvidia.com/gpu"] = 99
    user.apply(manifests.pod("many", "true", container=limits))
    wait_for(lambda: "Insufficient nvidia.com/gpu" in user.kubectl("describe", "pod", "many"), "the refusal")


def test_shared_volume_is_seen_from_all_nodes(user: User) -> None:
    """What uid 1000 writes to a shared volume on one node is read on another and on the host."""
    directory = user.cluster.shared / "data"
    directory.mkdir()
    directory.chmod(0o777)
    user.apply(*manifests.volume("data", str(directory)))
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/var/lib/data"}]}

    def run(name: str, command: str, node: str) -> str:
        return user.result(manifests.pod(name, command, node=node, volumes=volumes, container=mounts))

    run("writer", "echo kept > /var/lib/data/file", "node-a")
    assert run("reader", "cat /var/lib/data/file", "node-b") == "kept\n"
    assert (directory / "file").read_text() == "kept\n"
    assert (directory / "file").stat().st_uid == 1000


def test_one_chosen_process_of_a_pod_can_be_killed(user: User) -> None:
    """The host finds a pod's processes by name and by UID; killing one leaves the others alone."""
    user.run(manifests.pod("two", "sleep 1001; echo child ended; exec sleep 1002"))
    uid = user.get("pod", "two")["metadata"]["uid"]
    wait_for(lambda: len(user.cluster.container_pids("two", user.namespace)) == 2, "both processes")
    processes = user.cluster.pod_processes("two", user.namespace)
    assert processes == user.cluster.pod_processes(uid)
    assert [p.argv[:2] for p in processes] == [("sh", "-c"), ("sleep", "1001")]
    os.kill(processes[1].pid, signal.SIGKILL)
    wait_for(lambda: "child ended" in user.kubectl("logs", "two"), "the shell to go on")
    assert user.cluster.container_pids("two", user.namespace) == [processes[0].pid]
    assert user.cluster.container_pids("two", "elsewhere") == []
