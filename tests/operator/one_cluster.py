"""A cluster over plain dicts, for the tests of the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

from everloop_operator.api import names
from everloop_operator.core.events import Event
from everloop_operator.loop.cache import key_of
from everloop_operator.loop.ports import Absent, Body, ClusterError, Conflict, Forbidden, Key, Listed, Refused
from tests.operator.builders import NOW


def clock() -> datetime:
    return NOW


class OneCluster:
    """`Cluster` over plain dicts, with a log of what was written, and a failure on demand."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.objects: dict[Key, dict[str, Any]] = {}
        self.secrets: dict[tuple[str, str], dict[str, Any]] = {}
        self.written: list[str] = []
        self.events: list[Event] = []
        self.version = 100
        self.refuse = ""
        self.taken = ""
        """Kind and name of a child of which somebody else has one."""
        self.refuse_events = False
        self.broken = ""
        self.conflict = False
        self.claims_read = 0

    def stamped(self, body: Body, **metadata: Any) -> dict[str, Any]:
        self.version += 1
        merged = {"uid": f"uid-{body['metadata']['name']}", **body["metadata"], **metadata}
        return {**body, "metadata": {**merged, "resourceVersion": str(self.version)}}

    def add(self, body: Body) -> dict[str, Any]:
        """A person creates a TrainingSession or an RLJob."""
        made = self.stamped(body, namespace="team", generation=1)
        self.objects[key_of(made)] = made
        return made

    def replace(self, body: Body) -> dict[str, Any]:
        """A TrainingSession or an RLJob becomes another one."""
        self.objects[key_of(body)] = self.stamped(body)
        return self.objects[key_of(body)]

    def _listed(self, kind: str) -> Listed:
        return Listed(tuple(body for key, body in self.objects.items() if key.kind == kind), self.version)

    async def list_sessions(self) -> AsyncIterator[Listed]:
        yield self._listed(names.TRAINING_SESSION_KIND)

    async def list_jobs(self) -> AsyncIterator[Listed]:
        yield self._listed(names.RL_JOB_KIND)

    async def list_job_keys(self) -> Listed:
        found = (body for body in self.secrets.values() if names.LABEL_JOB_UID in body["metadata"]["labels"])
        return Listed(tuple(found), self.version)

    async def list_pods(self) -> AsyncIterator[Listed]:
        yield Listed(tuple(self.pods.values()), self.version)

    async def list_nodes(self) -> AsyncIterator[Listed]:
        yield Listed(tuple(self.nodes.values()), self.version)

    async def latest(self, body: Body) -> Body:
        if key_of(body) not in self.objects:
            raise Absent(body["metadata"]["name"])
        return self.objects[key_of(body)]

    async def pod(self, namespace: str, name: str) -> Body:
        if name not in self.pods:
            raise Absent(name)
        return self.pods[name]

    async def node(self, name: str) -> Body:
        if name not in self.nodes:
            raise Absent(name)
        return self.nodes[name]

    async def claim(self, namespace: str, name: str) -> Body:
        self.claims_read += 1
        metadata = {"name": name, "uid": f"uid-{name}-{self.claims_read}"}
        return {"metadata": metadata, "spec": {}, "status": {"phase": "Bound", "accessModes": ["ReadWriteMany"]}}

    async def volume(self, name: str) -> Body:
        raise Absent(name)

    async def events_of(self, namespace: str, kind: str, name: str) -> Listed:
        return Listed((), self.version)

    async def create_claim(self, body: Body) -> None:
        self.written.append(f"claim {body['metadata']['name']}")

    async def apply(self, body: Body) -> Body:
        self.written.append(f"apply {body['kind']} {body['metadata']['name']}")
        if f"{body['kind']} {body['metadata']['name']}" == self.taken:
            raise Forbidden("exists already")
        if body["kind"] == "Pod" and self.broken:
            raise ClusterError(self.broken)
        if body["kind"] == "Pod" and self.refuse:
            raise Refused(self.refuse)
        made = self.stamped(body, creationTimestamp="2026-05-01T11:59:00Z")
        if body["kind"] == "Pod":
            self.pods[body["metadata"]["name"]] = made
        elif body["kind"] == "PodDisruptionBudget":
            pass
        elif body["kind"] == "Secret":
            self.secrets[body["metadata"]["namespace"], body["metadata"]["name"]] = made
        else:
            self.objects[key_of(made)] = made
        return made

    async def delete_pod(self, namespace: str, name: str, *, uid: str, force: bool) -> None:
        self.written.append(f"delete Pod {name}")

    async def delete_secret(self, namespace: str, name: str) -> None:
        self.written.append(f"delete Secret {name}")
        self.secrets.pop((namespace, name), None)

    async def delete_owned_secret(self, namespace: str, name: str, *, owner: str) -> None:
        await self.delete_secret(namespace, name)

    async def delete_session(self, namespace: str, name: str, *, uid: str) -> None:
        self.written.append(f"delete TrainingSession {name}")

    async def set_finalizers(self, body: Body, finalizers: Sequence[str]) -> Body:
        self.written.append(f"finalizers {list(finalizers)}")
        return self.replace({**body, "metadata": {**body["metadata"], "finalizers": list(finalizers)}})

    async def write_status(self, body: Body, status: Body) -> Body:
        if self.conflict:
            raise Conflict("somebody wrote")
        self.written.append(f"status {status['phase']}")
        return self.replace({**body, "status": status})

    async def post_event(self, body: Body, event: Event, time: datetime) -> None:
        if self.refuse_events:
            raise Refused("forbidden")
        self.events.append(event)
