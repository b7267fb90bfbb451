"""What a soak kills, and how it brings back what does not come back by itself."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
from collections.abc import Callable, Sequence

from demo import faults, install
from demo.moments import running
from demo.session import Session
from tests.e2e.waiting import eventually

INSIDE = ("engine", "server", "spare", "supervisor")
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
LEAST_NODES = 2
"""That must be Ready before one more is taken away."""


Strike = Callable[[], object]
"""Kills what was aimed at. Raises LookupError or ProcessLookupError if that has gone meanwhile."""


class Victims:
    """Everything of one installation that can be killed."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        cluster = session.cluster
        self._session = session
        self._rng = rng
        self._lost: dict[str, Callable[[str], None]] = {}
        nodes = {
            "node": (cluster.node_kill, cluster.node_heal),
            "partition": (cluster.node_partition, cluster.node_heal),
            "freeze": (cluster.node_freeze, cluster.node_thaw),
        }
        self._aims: dict[str, Callable[[], Strike]] = {
            "pod": self._aim_at_pod,
            **{role: functools.partial(self._aim_inside, role) for role in INSIDE},
            **{name: functools.partial(self._aim_at_node, *how) for name, how in nodes.items()},
            "operator": functools.partial(self._aim_at_pod_of, "operator"),
            "gateway": functools.partial(self._aim_at_pod_of, "gateway"),
            **{name: functools.partial(self._aim_at_component, name) for name in COMPONENTS},
        }
        """Those that need the API server for the strike itself come first."""

    @property
    def names(self) -> tuple[str, ...]:
        """What can be killed."""
        return tuple(self._aims)

    def strike(self, drawn: Sequence[str], wanted: int) -> list[str]:
        """Kill the first so many of these that can be killed just now, all in one moment; fewer if others are down.

        Looking for a victim may take seconds, so that all are found before the first is killed.
        """
        aimed: dict[str, Strike] = {}
        for name in drawn:
            if len(aimed) < wanted:
                with contextlib.suppress(LookupError):  # down from the fault before
                    aimed[name] = self._aims[name]()
        struck = []
        for name in sorted(aimed, key=self.names.index):
            with contextlib.suppress(LookupError, ProcessLookupError):  # went down with the one before
                aimed[name]()
                struck.append(name)
        return struck

    def bring_back(self) -> None:
        """Let lost nodes join again that the session has left, without waiting for them."""
        for node in [node for node in self._lost if node != self._pod().get("node")]:
            self._lost.pop(node)(node)

    def _pod(self) -> dict[str, str]:
        return eventually(self._status_pod, "a pod in the status", seconds=240)

    def _status_pod(self) -> dict[str, str] | None:
        try:
            return self._session.status().get("pod")
        except RuntimeError:  # the API server is among the victims
            return None

    def _aim_inside(self, role: str) -> Strike:
        pids, now = self._session.pids(self._pod()["name"]), running(self._session.journal())
        return functools.partial(faults.kill, pids, role, now.engine if now else None)

    def _aim_at_pod(self) -> Strike:
        return functools.partial(self._delete_pod, self._pod()["name"])

    def _delete_pod(self, name: str) -> None:
        namespace = self._session.namespace
        try:
            self._session.tools.kube(
                "-n", namespace, "delete", "pod", name, "--grace-period=0", "--force", "--ignore-not-found"
            )
        except RuntimeError as error:
            raise LookupError("the API server does not answer") from error

    def _aim_at_node(self, lose: Callable[[str], None], bring_back: Callable[[str], None]) -> Strike:
        cluster = self._session.cluster
        node = self._pod()["node"]
        if not node:
            raise LookupError("the pod is on no node yet")
        if node in self._lost:
            raise LookupError(f"{node} is lost already")
        others = [name for name in cluster.settings.nodes if name not in (node, *self._lost)]
        if sum(cluster.is_node_ready(name) for name in others) < LEAST_NODES:
            raise LookupError("too few other nodes are Ready")
        return functools.partial(self._lose_node, node, lose, bring_back)

    def _lose_node(self, node: str, lose: Callable[[str], None], bring_back: Callable[[str], None]) -> None:
        if node in self._lost:
            raise LookupError(f"{node} is lost already")
        lose(node)
        self._lost[node] = bring_back

    def _aim_at_pod_of(self, component: str) -> Strike:
        selector = f"app.kubernetes.io/component={component}"
        try:
            found = self._session.tools.get("-n", install.RELEASE_NAMESPACE, "pods", "-l", selector)["items"]
        except RuntimeError as error:
            raise LookupError("the API server does not answer") from error
        pod = self._rng.choice(sorted(pod["metadata"]["name"] for pod in found))
        pids = self._session.cluster.container_pids(pod, install.RELEASE_NAMESPACE)
        if not pids:
            raise LookupError(f"{pod} does not run")
        return functools.partial(os.kill, pids[0], signal.SIGKILL)

    def _aim_at_component(self, name: str) -> Strike:
        component = self._session.cluster.component(name)
        if component is None:
            raise LookupError(f"{name} does not run")
        return component.kill
