"""What a cluster is made of, as its root directory records it, and which addresses it may use.

Everything listens in 127.0.0.0/8. The control plane is on 127.0.0.1, a node with prefix 127.11 on 127.11.0.1, its pods
on 127.11.x.y, Services in a /16 of their own. Clusters that run at the same time use different prefixes and ports.
"""

from __future__ import annotations

import fcntl
import json
import random
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

NODE_OCTETS = range(10, 96)
SERVICE_OCTETS = range(96, 121)
PORTS = range(20000, 32000)  # below the range from which the kernel takes ports for outgoing connections
LISTENERS = ("kube-apiserver", "etcd", "etcd-peer", "kube-controller-manager", "kube-scheduler")
LONGEST_SOCKET = "/nodes/{}/kubelet/pod-resources/kubelet.sock"
SOCKET_PATH_BYTES = 107


class ClusterError(Exception):
    """The cluster can't do what was asked; the message says why and what to do."""


class NodeState(StrEnum):
    """What a node is meant to be."""

    UP = "up"
    OFF = "off"
    """Powered off: none of its processes runs."""
    PARTITIONED = "partitioned"
    """Its kubelet is stopped for the control plane to miss; its containers live on."""
    FROZEN = "frozen"
    """All its processes are stopped where they are, until they go on."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    prefix: str
    """First two octets of its address and of its pods' addresses."""
    gpus: int
    state: NodeState = NodeState.UP

    @property
    def address(self) -> str:
        """The kubelet's address."""
        return f"{self.prefix}.0.1"


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster."""

    kube: str
    """Directory of the Kubernetes binary."""
    protobuf: str
    """Directory of the generated CRI modules."""
    ports: dict[str, int]
    """Port on 127.0.0.1 of each of `LISTENERS`."""
    service_octet: int
    """Services are in 127.<service_octet>.0.0/16."""
    nodes: dict[str, Node] = field(default_factory=dict)
    stopping: bool = False
    """Set by ``down``: nothing is started any more."""

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://127.0.0.1:{self.ports['kube-apiserver']}"

    @property
    def service_range(self) -> str:
        """The Services' address range."""
        return f"127.{self.service_octet}.0.0/16"

    def octets(self) -> set[int]:
        """Return the second octets of 127.0.0.0/8 that this cluster uses."""
        return {self.service_octet, *(int(node.prefix.split(".")[1]) for node in self.nodes.values())}

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return what `to_json` wrote."""
        value = json.loads(text)
        nodes = {
            name: Node(node["prefix"], node["gpus"], NodeState(node["state"])) for name, node in value["nodes"].items()
        }
        return cls(**{**value, "nodes": nodes})


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie below a cluster's root directory."""

    root: Path

    @property
    def settings(self) -> Path:
        """The `Settings`."""
        return self.root / "cluster.json"

    @property
    def lock(self) -> Path:
        """Held while processes are started or killed, and while the settings change."""
        return self.root / "lock"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.root / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.root / "control" / "pki"

    @property
    def pids(self) -> Path:
        """One file per component: its process."""
        return self.root / "pids"

    @property
    def logs(self) -> Path:
        """One file per component: its output."""
        return self.root / "log"

    @property
    def images(self) -> Path:
        """What image names stand for."""
        return self.root / "images.json"

    @property
    def services(self) -> Path:
        """The Services of the cluster, for the hosts file of containers."""
        return self.root / "services.json"

    @property
    def shared(self) -> Path:
        """Storage that all nodes see."""
        return self.root / "shared"

    def node(self, name: str) -> Path:
        """Everything of one node."""
        return self.root / "nodes" / name

    def cri_socket(self, name: str) -> Path:
        """Where the node's container runtime listens."""
        return self.node(name) / "cri" / "cri.sock"

    def boot_id(self, name: str) -> Path:
        """The node's boot id: a file in the place of the kernel's, new after every power failure."""
        return self.node(name) / "proc-sys" / "kernel" / "random" / "boot_id"

    def own(self) -> list[Path]:
        """Everything that belongs to one life of the cluster, so not `shared`."""
        files = [self.settings, self.kubeconfig, self.images, self.services]
        return [*files, self.root / "control", self.root / "nodes", self.pids, self.logs, self.root / "run"]

    def read(self) -> Settings:
        """Return the settings.

        Raises:
            ClusterError: there is no cluster here.
        """
        try:
            return Settings.from_json(self.settings.read_text())
        except FileNotFoundError as e:
            raise ClusterError(f"{self.root}: no cluster here") from e

    def write(self, settings: Settings) -> None:
        """Replace the settings."""
        write_private(self.settings, settings.to_json())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cluster's lock."""
        with file_lock(self.lock):
            yield


def check_root(root: Path) -> Path:
    """Return the real path of a root directory that the cluster can live in.

    Raises:
        ClusterError: it lies where a kubelet or a container has a file system of its own, or its path is too long.
    """
    real = root.resolve()
    for place in ("/var/lib", "/var/log", "/proc", "/sys", "/dev", "/run"):
        if real.is_relative_to(place):
            raise ClusterError(f"{real}: the cluster's root can't lie in {place}; choose another directory")
    if real == Path("/"):
        raise ClusterError("/: choose a directory of the cluster's own")
    check_socket_path(real, "node-a")
    return real


def check_seen_by_kubelets(binaries: Path) -> None:
    """Raise `ClusterError` if a kubelet, which has its own /var/lib and /var/log, could not see its binary."""
    for place in ("/var/lib", "/var/log"):
        if binaries.resolve().is_relative_to(place):
            raise ClusterError(f"{binaries}: EVERLOOP_CACHE can't lie in {place}; choose another directory")


def check_socket_path(root: Path, node: str) -> None:
    """Raise `ClusterError` if a kubelet's sockets would have longer paths than the kernel takes."""
    length = len(os_path := f"{root}{LONGEST_SOCKET.format(node)}")
    if length > SOCKET_PATH_BYTES:
        raise ClusterError(f"{os_path}: {length} bytes, and a socket's path may have {SOCKET_PATH_BYTES}")


def check_node_name(name: str) -> None:
    """Raise `ClusterError` unless the name can be a node's."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", name):
        raise ClusterError(f"node {name!r}: a name has up to 32 lower-case letters, digits and dashes")


def free_octet(among: Iterable[int], used: set[int]) -> int:
    """Return the first octet that is not used.

    Raises:
        ClusterError: all are.
    """
    for octet in among:
        if octet not in used:
            return octet
    raise ClusterError("no free range left in 127.0.0.0/8: too many nodes or clusters on this machine")


def choose_ports(api_port: int, used: set[int]) -> dict[str, int]:
    """Return a free port for each of `LISTENERS`; `api_port` is the API server's, 0 = choose.

    Raises:
        ClusterError: `api_port` is taken.
    """
    if api_port and (api_port in used or not _is_free(api_port)):
        raise ClusterError(f"port {api_port} is taken")
    candidates = (p for p in random.sample(PORTS, len(PORTS)) if p not in used and p != api_port and _is_free(p))
    ports = {name: next(candidates) for name in LISTENERS}
    return ports | ({"kube-apiserver": api_port} if api_port else {})


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is made if need be."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically; only its owner can read it."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.rename(path)
