"""What the watch has shown so far: sessions as read, their pods and all nodes as small values.

Signals may come late, twice or never. What comes late is recognised by its version; what never came is healed by the
next resync, which replaces everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from everloop_operator.api import names
from everloop_operator.core.node_rules import DRAIN, NodeRule
from everloop_operator.core.observed import Node, Pod
from everloop_operator.core.projections import node_of, owner_uid, pod_of

from .ports import Body, Key, Listed, Now


@dataclass(frozen=True, slots=True)
class CachedPod:
    """A session pod, the UID of the TrainingSession that owns it, and the version that was seen."""

    pod: Pod
    owner: str
    version: int


def version_of(body: Body) -> int:
    """The resourceVersion, which is ordered."""
    return int(body["metadata"]["resourceVersion"])


def key_of(body: Body) -> Key:
    """The key of a TrainingSession."""
    return Key(body["metadata"]["namespace"], body["metadata"]["name"])


def pod_key(body: Body) -> Key | None:
    """The key of the TrainingSession that a pod belongs to by its labels."""
    session = body["metadata"].get("labels", {}).get(names.LABEL_SESSION)
    return Key(body["metadata"]["namespace"], session) if session else None


class Cache:
    """Written by the watch, by resync and by our own writes; read by `observe`. Methods return the keys to wake."""

    def __init__(self, now: Now, rules: Sequence[NodeRule] = ()) -> None:
        self._now = now
        self._rules = (*rules, DRAIN)
        self._hosting: Counter[str] = Counter()
        self._sessions: dict[Key, dict[str, Any]] = {}
        self._pods: dict[Key, dict[str, CachedPod]] = {}
        self._nodes: dict[str, Node] = {}
        self._node_versions: dict[str, int] = {}
        self._deleted: set[str] = set()

    # --- reading ---

    def session(self, key: Key) -> dict[str, Any] | None:
        """The TrainingSession as read, or None."""
        return self._sessions.get(key)

    def keys(self) -> list[Key]:
        """All TrainingSessions."""
        return list(self._sessions)

    def pods(self, key: Key) -> list[CachedPod]:
        """All pods with the labels of this TrainingSession."""
        return list(self._pods.get(key, {}).values())

    def nodes(self) -> Mapping[str, Node]:
        """All nodes by name, as they are now: a view, because a copy for each pass would cost too much."""
        return MappingProxyType(self._nodes)

    def hosting(self) -> Mapping[str, int]:
        """How many session pods each node holds: a view."""
        return MappingProxyType(self._hosting)

    # --- signals ---

    def put_session(self, body: Body) -> set[Key]:
        """A TrainingSession was seen."""
        key, known = key_of(body), self._sessions.get(key_of(body))
        if known and version_of(known) >= version_of(body):
            return set()
        metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
        self._sessions[key] = {**body, "metadata": metadata}
        return {key}

    def drop_session(self, body: Body) -> set[Key]:
        """A TrainingSession was deleted."""
        self._deleted.add(body["metadata"]["uid"])
        known = self._sessions.get(key_of(body))
        if known and known["metadata"]["uid"] == body["metadata"]["uid"]:
            del self._sessions[key_of(body)]
        return {key_of(body)}

    def put_pod(self, body: Body) -> set[Key]:
        """A session pod was seen."""
        key, pod = pod_key(body), pod_of(body)
        if key is None or pod is None:
            return set()
        known = self._pods.get(key, {}).get(pod.name)
        if known and known.version >= version_of(body):
            return set()
        self._pods.setdefault(key, {})[pod.name] = CachedPod(pod, owner_uid(body), version_of(body))
        self._count(known.pod if known else None, -1)
        self._count(pod, +1)
        return set() if known and known.pod == pod else {key}

    def drop_pod(self, body: Body) -> set[Key]:
        """A session pod was deleted."""
        self._deleted.add(body["metadata"]["uid"])
        key, name = pod_key(body), body["metadata"]["name"]
        if key is None:
            return set()
        known = self._pods.get(key, {}).get(name)
        if known and known.pod.uid == body["metadata"]["uid"]:
            self._forget_pod(key, name)
        return {key}

    def put_node(self, body: Body) -> set[Key]:
        """A node was seen."""
        name = body["metadata"]["name"]
        if self._node_versions.get(name, 0) >= version_of(body):
            return set()
        known = self._nodes.get(name)
        node = self._nodes[name] = node_of(body, now=self._now(), rules=self._rules, previous=known)
        self._node_versions[name] = version_of(body)
        return set() if known == node else self._touched_by(node)

    def drop_node(self, body: Body) -> set[Key]:
        """A node was deleted."""
        self._deleted.add(body["metadata"]["uid"])
        known = self._nodes.get(body["metadata"]["name"])
        if known is None or known.uid != body["metadata"]["uid"]:
            return set()
        self._forget_node(known.name)
        return self._touched_by(known)

    def _touched_by(self, node: Node) -> set[Key]:
        """Sessions whose decision may depend on this node: it holds a pod, or a pod would like to be there."""
        return {
            key
            for key, pods in self._pods.items()
            for cached in pods.values()
            if cached.pod.node == node.name or node.hostname in cached.pod.avoided_nodes
        } | {
            key
            for key, body in self._sessions.items()
            if ((body.get("status") or {}).get("pod") or {}).get("node") == node.name
        }

    def _count(self, pod: Pod | None, change: int) -> None:
        if pod and pod.node:
            self._hosting[pod.node] += change
            if not self._hosting[pod.node]:
                del self._hosting[pod.node]

    def _forget_pod(self, key: Key, name: str) -> None:
        self._count(self._pods[key].pop(name).pod, -1)
        if not self._pods[key]:
            del self._pods[key]

    def _forget_node(self, name: str) -> None:
        del self._nodes[name]
        del self._node_versions[name]

    # --- resync ---

    def begin_resync(self) -> None:
        """Lists are about to be read: what is deleted from now on may still be in them."""
        self._deleted.clear()

    def replace(self, *, sessions: Listed, pods: Listed, nodes: Listed) -> set[Key]:
        """Takes over complete lists. What the watch showed after a list was read is kept. Returns every key."""
        before = set(self._sessions) | set(self._pods)
        known_sessions = {body["metadata"]["uid"] for body in self._live(sessions)}
        for body in self._live(sessions):
            self.put_session(body)
        for key, kept in list(self._sessions.items()):
            if kept["metadata"]["uid"] not in known_sessions and version_of(kept) <= sessions.version:
                del self._sessions[key]
        known_pods = {body["metadata"]["uid"] for body in self._live(pods)}
        for body in self._live(pods):
            self.put_pod(body)
        for key, of_session in list(self._pods.items()):
            for name, cached in list(of_session.items()):
                if cached.pod.uid not in known_pods and cached.version <= pods.version:
                    self._forget_pod(key, name)
        known_nodes = {body["metadata"]["uid"] for body in self._live(nodes)}
        for body in self._live(nodes):
            self.put_node(body)
        for name, node in list(self._nodes.items()):
            if node.uid not in known_nodes and self._node_versions[name] <= nodes.version:
                self._forget_node(name)
        return before | set(self._sessions) | set(self._pods)

    def _live(self, listed: Listed) -> Iterable[Body]:
        return (body for body in listed.items if body["metadata"]["uid"] not in self._deleted)
