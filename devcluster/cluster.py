"""A cluster from Python: up, down, and the accidents that happen to nodes."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from devcluster import build, components, credentials, supervisor
from devcluster.api import ApiClient, ApiError
from devcluster.cri.images import parse_images
from devcluster.pods import PodProcess, pod_processes
from devcluster.processes import Process, cluster_roots, kill_marked, marked, stop_marked
from devcluster.settings import (
    NODE_OCTETS,
    SERVICE_OCTETS,
    ClusterError,
    Layout,
    Node,
    NodeState,
    Settings,
    check_node_name,
    check_root,
    check_seen_by_kubelets,
    check_socket_path,
    choose_ports,
    file_lock,
    free_octet,
    write_private,
)

MACHINE_LOCK = Path("/tmp/everloop-devcluster.lock")
STOP_SECONDS = 3.0


class Cluster:
    """A cluster in a root directory, running or not. Needs root.

    The root must not lie in /var/lib, /var/log, /run or a kernel file system. Several clusters may run at the same
    time in different roots. Methods raise `ClusterError` when they can't do what they are asked.
    """

    def __init__(self, root: Path | str) -> None:
        self.layout = Layout(check_root(Path(root)))
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        """The root directory."""
        return self.layout.root

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; there once `up` has begun."""
        return self.layout.kubeconfig

    @property
    def shared(self) -> Path:
        """A directory that everybody may write to and all nodes see: the place for volumes of type hostPath."""
        return self.layout.shared

    @property
    def settings(self) -> Settings:
        """What the cluster is made of now."""
        return self.layout.read()

    @property
    def api(self) -> ApiClient:
        """The API server, as administrator."""
        return ApiClient(self.kubeconfig)

    # --- up and down ---

    def up(
        self, *, nodes: int = 3, gpus: int = 4, port: int = 0, images: Path | None = None, seconds: float = 120
    ) -> None:
        """Start a new cluster and return when all its nodes are Ready. On any failure nothing stays behind.

        What an earlier cluster left in the root is removed, but for `shared`; other files are left alone.

        Args:
            nodes: how many nodes (node-a, node-b, ..).
            gpus: pretend GPUs (nvidia.com/gpu) of each node.
            port: of the API server on 127.0.0.1; 0 chooses a free one.
            images: JSON list of `devcluster.cri.images.Image`; without it every image is the host itself.
            seconds: after which it is a failure.
        """
        if os.geteuid() != 0:
            raise ClusterError("the local cluster needs root: it mounts and changes users")
        if not 1 <= nodes <= 26:
            raise ClusterError(f"nodes: {nodes} is not between 1 and 26")
        kube = build.ensure_kube()
        check_seen_by_kubelets(kube)
        text = images.read_text() if images else "[]"
        try:
            parse_images(text)
        except ValueError as e:
            raise ClusterError(f"{images}: {e}") from e
        if marked(self.root):
            raise ClusterError(f"{self.root}: the cluster is up already, or some of it is; take it down first")
        try:
            with file_lock(MACHINE_LOCK):  # until other clusters can see which addresses this one has
                self._prepare(kube, nodes, gpus, port, text)
                self._supervisor = supervisor.start(self.layout)
            names = list(self.settings.nodes)
            self._wait(f"nodes {', '.join(names)} Ready", lambda: all(self.is_node_ready(n) for n in names), seconds)
        except BaseException:
            self.down()
            raise

    def _prepare(self, kube: Path, nodes: int, gpus: int, port: int, images: str) -> None:
        layout = self.layout
        for path in layout.own():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in (layout.root, layout.pids, layout.logs, layout.root / "run", layout.shared):
            path.mkdir(parents=True, exist_ok=True)
        (layout.root / "run").chmod(0o700)
        layout.shared.chmod(0o777)
        others = _other_clusters()
        used = {octet for settings in others for octet in settings.octets()}
        members = {}
        for i in range(nodes):
            octet = free_octet(NODE_OCTETS, used)
            used.add(octet)
            members[f"node-{chr(ord('a') + i)}"] = Node(f"127.{octet}", gpus)
        ports = choose_ports(port, {p for settings in others for p in settings.ports.values()})
        protobuf = str(build.protobuf_directory(kube))
        settings = Settings(str(kube), protobuf, ports, free_octet(SERVICE_OCTETS, used), members)
        layout.images.write_text(images)
        write_private(layout.services, "[]")
        credentials.create(layout, settings)
        for name in members:
            self._prepare_node(settings, name)
        layout.write(settings)

    def _prepare_node(self, settings: Settings, name: str) -> None:
        components.write_node_files(self.layout, settings, name)
        credentials.create_for_node(self.layout, settings, name)

    def down(self) -> None:
        """End every process of the cluster, pods included, and with them its mounts. Does nothing when it is down."""
        keeper = Process.load(self.layout.pids / "supervisor")
        if self.layout.settings.exists():
            with self.layout.locked():
                self.layout.write(replace(self.settings, stopping=True))
            # The supervisor goes last and by itself, once it has collected all the others.
            kill_marked(self.root, spare=frozenset({keeper.pid} if keeper else ()))
            deadline = time.monotonic() + STOP_SECONDS
            while keeper and keeper.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        kill_marked(self.root)
        if self._supervisor:
            self._supervisor.wait()
            self._supervisor = None

    # --- accidents and changes of nodes ---

    def node_add(self, name: str, gpus: int = 4) -> None:
        """Let one more node join. Returns at once; see `wait_node`."""
        check_node_name(name)
        check_socket_path(self.root, name)
        with file_lock(MACHINE_LOCK), self.layout.locked():
            settings = self.settings
            if name in settings.nodes:
                raise ClusterError(f"node {name!r}: there is one already")
            used = settings.octets() | {octet for other in _other_clusters() for octet in other.octets()}
            node = Node(f"127.{free_octet(NODE_OCTETS, used)}", gpus)
            settings = replace(settings, nodes={**settings.nodes, name: node})
            self._prepare_node(settings, name)
            self.layout.write(settings)

    def node_kill(self, name: str) -> None:
        """Switch a node off: all its processes end at once, and what was in memory is lost."""
        with self.layout.locked():
            self._set_state(name, NodeState.OFF)
            kill_marked(self.root, name)
            self._unmount(self.layout.node(name))
            components.write_boot_id(self.layout, name)

    def node_partition(self, name: str) -> None:
        """Cut a node off: its kubelet stops, its containers live on and go on answering."""
        with self.layout.locked():
            self._refuse_frozen(name)
            self._set_state(name, NodeState.PARTITIONED)
            kubelet = Process.load(self.layout.pids / f"kubelet-{name}")
            while kubelet and kubelet.alive():
                kubelet.kill()
                time.sleep(0.01)

    def node_heal(self, name: str) -> None:
        """Bring back a node that was killed or partitioned. Returns at once; see `wait_node`."""
        with self.layout.locked():
            self._refuse_frozen(name)
            self._set_state(name, NodeState.UP)

    def node_freeze(self, name: str) -> None:
        """Stop every process of a node where it is, kubelet, runtime and containers, memory and connections kept.

        The kernel still takes connections to its pods; nobody answers. Returns once all have stopped.
        """
        with self.layout.locked():
            state = self._node(name).state
            if state != NodeState.UP:
                raise ClusterError(f"node {name!r}: it is {state}, and only one that is up can be frozen")
            self._set_state(name, NodeState.FROZEN)
            stop_marked(self.root, name)

    def node_thaw(self, name: str) -> None:
        """Let a frozen node go on, as if no time had passed for it. Returns at once; see `wait_node`."""
        with self.layout.locked():
            state = self._node(name).state
            if state != NodeState.FROZEN:
                raise ClusterError(f"node {name!r}: it is {state}, not frozen")
            for process in marked(self.root, name):
                process.kill(signal.SIGCONT)
            self._set_state(name, NodeState.UP)

    def node_remove(self, name: str) -> None:
        """Kill a node, delete its Node object and forget it."""
        self.node_kill(name)
        self.api.delete(f"/api/v1/nodes/{name}")
        with self.layout.locked():
            settings = self.settings
            left = {other: node for other, node in settings.nodes.items() if other != name}
            self.layout.write(replace(settings, nodes=left))
            shutil.rmtree(self.layout.node(name))
            for component in ("cri", "kubelet"):
                (self.layout.pids / f"{component}-{name}").unlink(missing_ok=True)

    def _node(self, name: str) -> Node:
        nodes = self.settings.nodes
        if name not in nodes:
            raise ClusterError(f"node {name!r}: no such node; there are {', '.join(nodes)}")
        return nodes[name]

    def _refuse_frozen(self, name: str) -> None:
        if self._node(name).state == NodeState.FROZEN:
            raise ClusterError(f"node {name!r}: it is frozen; thaw it first")

    def _set_state(self, name: str, state: NodeState) -> None:
        node, settings = replace(self._node(name), state=state), self.settings
        self.layout.write(replace(settings, nodes={**settings.nodes, name: node}))

    def _unmount(self, directory: Path) -> None:
        """Unmount everything below a directory in the cluster's mount namespace."""
        keeper = Process.load(self.layout.pids / "supervisor")
        if keeper is None:
            raise ClusterError(f"{self.root}: the supervisor is gone; take the cluster down")
        lines = Path(f"/proc/{keeper.pid}/mountinfo").read_text().splitlines()
        points = [line.split()[4] for line in lines]
        below = [point for point in reversed(points) if Path(point).is_relative_to(directory)]
        if below:
            command = ["nsenter", f"--mount=/proc/{keeper.pid}/ns/mnt", "--", "umount", "--lazy", *below]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ClusterError(f"unmounting below {directory}: {done.stderr.strip()}")

    # --- looking ---

    def is_node_ready(self, name: str) -> bool:
        """Whether the control plane says that a node is Ready, has no taint and all its pretend GPUs.

        False while it can't be asked.
        """
        try:
            node = self.api.get(f"/api/v1/nodes/{name}")
        except (OSError, http.client.HTTPException, ApiError):
            return False
        conditions = node["status"].get("conditions", [])
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        gpus = int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0))
        return ready and not node["spec"].get("taints") and gpus == self._node(name).gpus

    def wait_node(self, name: str, *, ready: bool, seconds: float = 60) -> float:
        """Wait until a node is Ready, or until it is not; returns how many seconds it took."""
        what = f"node {name} {'' if ready else 'not '}Ready"
        return self._wait(what, lambda: self.is_node_ready(name) is ready, seconds)

    def pod_processes(self, pod: str, namespace: str = "default") -> list[PodProcess]:
        """Return every process in the containers of a pod (name or UID), whatever the control plane knows of it."""
        return pod_processes(self.layout, pod, namespace)

    def container_pids(self, pod: str, namespace: str = "default") -> list[int]:
        """Return the host's numbers of `pod_processes`."""
        return [process.pid for process in self.pod_processes(pod, namespace)]

    def component(self, name: str) -> Process | None:
        """Return the living process of a component: etcd, kube-apiserver, .., cri-NODE, kubelet-NODE, supervisor."""
        return Process.load(self.layout.pids / name)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return its output."""
        cache = str(self.root / "run" / "kube-cache")
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": cache}
        done = subprocess.run(
            [f"{self.settings.kube}/kubectl", *arguments], input=stdin, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def _wait(self, what: str, condition: Callable[[], bool], seconds: float) -> float:
        start = time.monotonic()
        while not condition():
            waited = time.monotonic() - start
            if waited > seconds:
                raise ClusterError(f"{what}: not after {seconds:.0f} s; see {self.layout.logs}")
            if self.component("supervisor") is None:
                log = self.layout.logs / "supervisor"
                raise ClusterError(f"the supervisor has ended: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        return time.monotonic() - start


def _other_clusters() -> list[Settings]:
    """Return the settings of all clusters that run on this machine."""
    found = []
    for root in cluster_roots():
        try:
            found.append(Layout(root).read())
        except ClusterError:  # its directory is gone, and with it all that tells its addresses
            continue
    return found
