"""The processes of a cluster: their command lines and configuration, and what must be there before each starts."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from devcluster.cri.config import Config as RuntimeConfig
from devcluster.processes import NODE_VARIABLE, ROOT_VARIABLE
from devcluster.settings import Layout, NodeState, Settings
from devcluster.shim.linux import in_user_namespace

SHIM = Path(__file__).resolve().parent / "shim" / "__main__.py"

# Kernel settings that the kubelet insists on. It finds these instead of the real ones in its mount namespace, so it
# neither fails nor changes the machine's.
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}

# A kubelet's own mount namespace: /var/lib/kubelet/device-plugins and /var/log/containers are fixed paths, so every
# node needs its own.
KUBELET_NAMESPACE = """
set -e
node=$1; shift
if [ -d /var/lib/kubelet ]; then mount -t tmpfs tmpfs /var/lib/kubelet
else mount -t tmpfs tmpfs /var/lib; fi
mkdir -p /var/lib/kubelet/device-plugins
mount --bind "$node/device-plugins" /var/lib/kubelet/device-plugins
mount -t tmpfs tmpfs /var/log
(cd "$node/proc-sys" && find . -type f) | while read -r f; do
  mount --bind "$node/proc-sys/$f" "/proc/sys/$f"
done
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Component:
    """A process that is to run."""

    name: str
    argv: tuple[str, ...]
    needs_api: bool = False
    """Starts once the API server is ready."""
    needs_socket: Path | None = None
    """Starts once somebody answers there."""
    environment: dict[str, str] = field(default_factory=dict)


def components(layout: Layout, settings: Settings) -> list[Component]:
    """Return everything that is to run, by the settings."""
    if settings.stopping:
        return []
    wanted = [*_control_plane(layout, settings)]
    for name, node in settings.nodes.items():
        if node.state in (NodeState.UP, NodeState.PARTITIONED):
            wanted.append(_runtime(layout, settings, name))
        if node.state == NodeState.UP:
            wanted.append(_kubelet(layout, settings, name))
    return wanted


def _control_plane(layout: Layout, settings: Settings) -> list[Component]:
    pki, ports = layout.pki, settings.ports
    etcd, peer = f"https://127.0.0.1:{ports['etcd']}", f"https://127.0.0.1:{ports['etcd-peer']}"
    return [
        _kube(
            settings,
            "etcd",
            f"--data-dir={layout.root}/control/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            "--client-cert-auth",
            f"--cert-file={pki}/etcd.crt",
            f"--key-file={pki}/etcd.key",
            f"--trusted-ca-file={pki}/ca.crt",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            "--peer-client-cert-auth",
            f"--peer-cert-file={pki}/etcd.crt",
            f"--peer-key-file={pki}/etcd.key",
            f"--peer-trusted-ca-file={pki}/ca.crt",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        ),
        _kube(
            settings,
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--etcd-cafile={pki}/ca.crt",
            f"--etcd-certfile={pki}/etcd.crt",
            f"--etcd-keyfile={pki}/etcd.key",
            "--bind-address=127.0.0.1",
            f"--secure-port={ports['kube-apiserver']}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--token-auth-file={pki}/tokens.csv",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={settings.service_range}",
            "--endpoint-reconciler-type=none",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5",
        ),
        _kube(
            settings,
            "kube-controller-manager",
            f"--kubeconfig={pki}/controller-manager.kubeconfig",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={ports['kube-controller-manager']}",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--root-ca-file={pki}/ca.crt",
            "--use-service-account-credentials=true",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=6s",
            "--node-eviction-rate=100",
            "--unhealthy-zone-threshold=1",
            needs_api=True,
        ),
        _kube(
            settings,
            "kube-scheduler",
            f"--kubeconfig={pki}/scheduler.kubeconfig",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={ports['kube-scheduler']}",
            needs_api=True,
        ),
        Component("cri-streaming", _streaming_command(layout, settings)),
        Component("agent", (sys.executable, "-m", "devcluster.agent", str(layout.root)), needs_api=True),
    ]


def _kube(settings: Settings, name: str, *flags: str, needs_api: bool = False) -> Component:
    return Component(name, (f"{settings.kube}/{name}", *flags), needs_api)


def _streaming_command(layout: Layout, settings: Settings) -> tuple[str, ...]:
    serve = (f"{settings.kube}/kube", "cri-streaming", "127.0.0.1:0", str(streaming_socket(layout)))
    return (*serve, sys.executable, "-I", "-S", str(SHIM), "exec")


def streaming_socket(layout: Layout) -> Path:
    """Return where ``kube cri-streaming`` listens."""
    return layout.root / "run" / "streaming.sock"


def _runtime(layout: Layout, settings: Settings, name: str) -> Component:
    path = layout.node(name) / "cri.json"
    environment = {"PYTHONPATH": settings.protobuf, NODE_VARIABLE: name}
    return Component(f"cri-{name}", (sys.executable, "-m", "devcluster.cri", str(path)), environment=environment)


def _kubelet(layout: Layout, settings: Settings, name: str) -> Component:
    node = layout.node(name)
    own_namespace = ("unshare", "--mount", "--propagation", "unchanged", "sh", "-c", KUBELET_NAMESPACE, "sh", str(node))
    command = (
        f"{settings.kube}/kubelet",
        f"--config={node}/kubelet.json",
        f"--kubeconfig={node}/kubeconfig",
        f"--root-dir={node}/kubelet",
        f"--cert-dir={node}/pki",
        f"--hostname-override={name}",
        "--cloud-provider=external",
    )
    return Component(
        f"kubelet-{name}",
        (*own_namespace, *command),
        needs_api=True,
        needs_socket=layout.cri_socket(name),
        environment={NODE_VARIABLE: name},
    )


def write_node_files(layout: Layout, settings: Settings, name: str) -> None:
    """Write the configuration of a node's kubelet and runtime."""
    directory = layout.node(name)
    for path in ("cri", "kubelet", "pki", "device-plugins", "logs", "volume-plugins"):
        (directory / path).mkdir(parents=True, exist_ok=True)
    for path, value in SYSCTLS.items():
        file = directory / "proc-sys" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    write_boot_id(layout, name)
    (directory / "kubelet.json").write_text(json.dumps(_kubelet_configuration(layout, settings, name), indent=1))
    node = settings.nodes[name]
    port = str(settings.ports["kube-apiserver"])
    runtime = RuntimeConfig(
        root=layout.root,
        directory=directory / "cri",
        boot_id=layout.boot_id(name),
        services=layout.services,
        images=layout.images,
        device_plugins=directory / "device-plugins",
        streaming=streaming_socket(layout),
        prefix=node.prefix,
        gpus=node.gpus,
        env={
            # The server itself rather than its Service: in-cluster clients then don't depend on the agent's proxy.
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": port,
            "KUBERNETES_SERVICE_PORT_HTTPS": port,
            ROOT_VARIABLE: str(layout.root),
            NODE_VARIABLE: name,
        },
    )
    (directory / "cri.json").write_text(runtime.to_json())


def write_boot_id(layout: Layout, name: str) -> None:
    """Give a node a new boot id. In place: the file may be mounted over the kernel's."""
    file = layout.boot_id(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{uuid.uuid4()}\n")


def _kubelet_configuration(layout: Layout, settings: Settings, name: str) -> dict[str, Any]:
    node, directory = settings.nodes[name], layout.node(name)
    certificate = layout.pki / f"node-{name}"
    signals = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree")
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "healthzBindAddress": node.address,
        "tlsCertFile": f"{certificate}.crt",
        "tlsPrivateKeyFile": f"{certificate}.key",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{layout.cri_socket(name)}",
        "podLogsDir": str(directory / "logs"),
        "volumePluginDir": str(directory / "volume-plugins"),
        "failCgroupV1": False,
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "protectKernelDefaults": True,
        "resolvConf": "",
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 4,
        "syncFrequency": "10s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "10s"},
        "serializeImagePulls": False,
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "evictionHard": dict.fromkeys(signals, "0%"),
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }
    if in_user_namespace():
        config["featureGates"] = {"KubeletInUserNamespace": True}
    return config
