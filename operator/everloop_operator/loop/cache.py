"""What the watch has shown so far: sessions and jobs packed, their pods and all nodes as small values.

Signals may come late, twice or never. What comes late is recognised by its version; what never came is healed by the
next resync, which replaces everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from everloop_operator.api import names
from everloop_operator.core.jobs.observed import Driver
from everloop_operator.core.jobs.projections import driver_of
from everloop_operator.core.node_rules import DRAIN, NodeRule
from everloop_operator.core.observed import Node, Pod
from everloop_operator.core.projections import node_of, owner_uid, pod_of

from .kept import Kept, Summary, keep
from .places import Places
from .ports import Body, Key, Listed, Now, job_key

POD_KIND, NODE_KIND = "Pod", "Node"


@dataclass(frozen=True, slots=True)
class CachedPod:
    """A pod of ours, the UID of the object that owns it, and the version that was seen."""

    pod: Pod
    owner: str
    version: int
    driver: Driver | None = None
    """All of it, if it is a driver pod."""


def version_of(body: Body) -> int:
    """The resourceVersion, which is ordered."""
    return int(body["metadata"]["resourceVersion"])


def key_of(body: Body) -> Key:
    """The key of a TrainingSession or an RLJob."""
    return Key(body["metadata"]["namespace"], body["metadata"]["name"], body["kind"])


def pod_key(body: Body) -> Key | None:
    """The key of the object that a pod belongs to by its labels."""
    namespace, labels = body["metadata"]["namespace"], body["metadata"].get("labels", {})
    if names.LABEL_JOB in labels:
        return job_key(namespace, labels[names.LABEL_JOB])
    return Key(namespace, labels[names.LABEL_SESSION]) if names.LABEL_SESSION in labels else None


def cached_pod(body: Body, key: Key) -> CachedPod | None:
    """The pod of the object with this key; None if its labels are not ours."""
    owner, version = owner_uid(body, key.kind), version_of(body)
    if key.kind == names.RL_JOB_KIND:
        driver = driver_of(body)
        return CachedPod(driver.pod, owner, version, driver) if driver else None
    pod = pod_of(body)
    return CachedPod(pod, owner, version) if pod else None


def session_of_job(body: Body) -> Key:
    """The key of the TrainingSession that an RLJob trains on."""
    reference = ((body.get("spec") or {}).get("session") or {}).get("ref") or {}
    return Key(body["metadata"]["namespace"], reference.get("name") or body["metadata"]["name"])


class Cache:
    """Written by the watch, by resync and by our own writes; read by `observe`. Methods return the keys to wake."""

    def __init__(self, now: Now, rules: Sequence[NodeRule] = (), *, nodes_watched: bool = True) -> None:
        self.nodes_watched = nodes_watched
        self._now = now
        self._rules = (*rules, DRAIN)
        self._hosting: Counter[str] = Counter()
        self._on, self._avoiding = Places(), Places()
        self._objects: dict[Key, Kept] = {}
        self._jobs_on: dict[Key, set[Key]] = {}
        self._pods: dict[Key, dict[str, CachedPod]] = {}
        self._nodes: dict[str, Node] = {}
        self._node_versions: dict[str, int] = {}
        self._deleted: set[str] = set()
        self._gone: dict[Key, set[str]] = {}
        self._puts: dict[str, Callable[[Body], set[Key]]] = {
            names.TRAINING_SESSION_KIND: self.put,
            names.RL_JOB_KIND: self.put,
            POD_KIND: self.put_pod,
            NODE_KIND: self.put_node,
        }

    # --- reading ---

    def get(self, key: Key) -> dict[str, Any] | None:
        """The TrainingSession or RLJob as read, without managedFields, or None. Unpacked for each call."""
        known = self._objects.get(key)
        return known.body() if known else None

    def summaries(self) -> dict[Key, Summary]:
        """What metrics tell of all TrainingSessions and RLJobs."""
        return {key: known.summary for key, known in self._objects.items()}

    def keys(self) -> list[Key]:
        """All TrainingSessions and RLJobs."""
        return list(self._objects)

    def pods(self, key: Key) -> list[CachedPod]:
        """All pods with the labels of this object."""
        return list(self._pods.get(key, {}).values())

    def gone(self, key: Key) -> frozenset[str]:
        """UIDs of the RLJobs of this name that were seen to go, and of which something may be left; see `settled`."""
        return frozenset(self._gone.get(key, ()))

    def settled(self, key: Key, uids: Set[str]) -> None:
        """Nothing is left of these jobs."""
        left = self._gone.get(key, set()) - uids
        if left:
            self._gone[key] = left
        else:
            self._gone.pop(key, None)

    def nodes(self) -> Mapping[str, Node]:
        """All nodes by name, as they are now: a view, because a copy for each pass would cost too much."""
        return MappingProxyType(self._nodes)

    def hosting(self) -> Mapping[str, int]:
        """How many session pods each node holds: a view."""
        return MappingProxyType(self._hosting)

    # --- signals ---

    def put(self, body: Body) -> set[Key]:
        """A TrainingSession or an RLJob was seen."""
        key = key_of(body)
        known = self._objects.get(key)
        if known and known.version >= version_of(body):
            return set()
        self._forget(key)
        kept = self._objects[key] = keep(body)
        self._on.count(kept.summary.node, key, +1)
        if key.kind == names.RL_JOB_KIND:
            self._jobs_on.setdefault(session_of_job(body), set()).add(key)
        return {key, *self._jobs_on.get(key, ())}

    def drop(self, body: Body) -> set[Key]:
        """A TrainingSession or an RLJob was deleted."""
        self._deleted.add(body["metadata"]["uid"])
        if body["kind"] == names.RL_JOB_KIND:
            self._gone.setdefault(key_of(body), set()).add(body["metadata"]["uid"])
        key = key_of(body)
        known = self._objects.get(key)
        if known and known.uid == body["metadata"]["uid"]:
            self._forget(key)
        return {key, *self._jobs_on.get(key, ())}

    def _forget(self, key: Key) -> None:
        known = self._objects.pop(key, None)
        if known:
            self._on.count(known.summary.node, key, -1)
        if known and key.kind == names.RL_JOB_KIND:
            session = session_of_job(known.body())
            self._jobs_on[session].discard(key)
            if not self._jobs_on[session]:
                del self._jobs_on[session]

    def put_pod(self, body: Body) -> set[Key]:
        """A session pod or a driver pod was seen."""
        key = pod_key(body)
        if key is None:
            return set()
        known = self._pods.get(key, {}).get(body["metadata"]["name"])
        if known and known.version >= version_of(body):
            return set()
        seen = cached_pod(body, key)
        if seen is None:
            return set()
        self._pods.setdefault(key, {})[seen.pod.name] = seen
        if known:
            self._count(key, known.pod, -1)
        self._count(key, seen.pod, +1)
        return set() if known and (known.pod, known.driver) == (seen.pod, seen.driver) else {key}

    def drop_pod(self, body: Body) -> set[Key]:
        """A session pod or a driver pod was deleted."""
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
        """Objects whose decision may depend on this node: it holds a pod, or a pod would like to be there."""
        return self._on.at(node.name) | self._avoiding.at(node.hostname)

    def _count(self, key: Key, pod: Pod, change: int) -> None:
        self._on.count(pod.node, key, change)
        for hostname in pod.avoided_nodes:
            self._avoiding.count(hostname, key, change)
        if pod.node and key.kind == names.TRAINING_SESSION_KIND:
            self._hosting[pod.node] += change
            if not self._hosting[pod.node]:
                del self._hosting[pod.node]

    def _forget_pod(self, key: Key, name: str) -> None:
        self._count(key, self._pods[key].pop(name).pod, -1)
        if not self._pods[key]:
            del self._pods[key]

    def _forget_node(self, name: str) -> None:
        del self._nodes[name]
        del self._node_versions[name]

    # --- resync ---

    def known(self) -> set[Key]:
        """Every object that was seen, or whose pods were."""
        return set(self._objects) | set(self._pods)

    def begin_resync(self) -> None:
        """Lists are about to be read: what is deleted from now on may still be in them."""
        self._deleted.clear()

    def take(self, kind: str, page: Listed) -> set[str]:
        """Takes over a page of the list of a kind. Returns the UIDs in it, without what was deleted meanwhile."""
        there = set()
        for body in page.items:
            uid = body["metadata"]["uid"]
            if uid not in self._deleted:
                there.add(uid)
                self._puts[kind](body)
        return there

    def finish(self, kind: str, there: Set[str], version: int) -> None:
        """Forgets what a complete list of a kind, which shows this version, lacks; not what the watch showed later."""
        if kind == POD_KIND:
            for key, of_object in list(self._pods.items()):
                for name, cached in list(of_object.items()):
                    if cached.pod.uid not in there and cached.version <= version:
                        self._forget_pod(key, name)
        elif kind == NODE_KIND:
            for name, node in list(self._nodes.items()):
                if node.uid not in there and self._node_versions[name] <= version:
                    self._forget_node(name)
        else:
            for key, kept in list(self._objects.items()):
                if key.kind == kind and kept.uid not in there and kept.version <= version:
                    self._forget(key)
