"""Many TrainingSessions that serve: their objects lie in the store, and a program of its own plays their trainers.

One of them is made by a real operator; the others are copies of it, written to etcd past the API server, which would
take minutes for as many.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from everloop_operator.api import names
from everloop_operator.api.tokens import master_key, session_token
from tests.operator.control_plane import ControlPlane
from tests.operator.world import RELEASE, Api, World, eventually
from tests.scale.audit import Entry

TRAINERS = Path(__file__).with_name("trainers.py")
PREFIX = "fleet"
PER_NAMESPACE = 40
PUTS_AT_A_TIME = 50
NETWORK = 83
"""Second octet of the addresses of the pods."""

Body = dict[str, Any]


@dataclass(frozen=True)
class Pattern:
    """A session that serves, and all that belongs to it."""

    session: Body
    pod: Body
    secret: Body
    node: Body
    report: Body


def pattern(world: World) -> Pattern:
    """Made by the operator that runs."""
    world.claims()
    node = world.node("a")
    world.create_session()
    trainer = world.run_pod("tuned-a1-0", node)
    world.wait_phase(names.PHASE_RUNNING, seconds=60)
    pod = world.pod("tuned-a1-0")
    found = world.api.get(f"/api/v1/nodes/{node}")
    secret = world.api.get(world.path("secrets", "tuned-a1-token"))
    assert pod is not None
    assert found is not None
    assert secret is not None
    return Pattern(world.session(), pod, secret, found, trainer.report)


class Fleet:
    """What `settle` has put into the cluster."""

    def __init__(
        self, api: Api, plane: ControlPlane, directory: Path, made: Pattern, sessions: int, nodes: int
    ) -> None:
        self.sessions = sessions
        self.nodes = [f"{PREFIX}-node-{number}" for number in range(nodes)]
        self._api, self._plane, self._directory, self._made = api, plane, directory, made
        self._lines: list[str] = []
        self._puts: list[tuple[str, Body]] = []

    @property
    def trainers(self) -> Path:
        """One line for each pod: its address, its token, and its report."""
        return self._directory / "trainers"

    def settle(self) -> None:
        """Everything is there once this returns."""
        secret = self._api.get(f"/api/v1/namespaces/{RELEASE}/secrets/{names.MASTER_KEY_SECRET}")
        assert secret
        self._master = master_key(base64.b64decode(secret["data"]["key"]).decode())
        for name in self.nodes:
            node = _renamed(self._made.node, {self._made.node["metadata"]["name"]: name})
            self._put(f"minions/{name}", node)
        for first in range(0, self.sessions, PER_NAMESPACE):
            namespace = f"{PREFIX}-{first // PER_NAMESPACE}"
            claim = self._claim(namespace)
            for number in range(first, min(first + PER_NAMESPACE, self.sessions)):
                self._add(number, namespace, claim)
        self._flush()
        self.trainers.write_text("".join(self._lines))
        path = f"/apis/{names.API_VERSION}/{names.TRAINING_SESSION_PLURAL}?limit=1"
        eventually("all sessions are there", lambda: self._listed(path) >= self.sessions, 60)

    def _claim(self, namespace: str) -> str:
        """Makes a namespace with claims; returns the UID of the journal's."""
        world = World(self._api, namespace, 0)
        world.claims()
        made = self._api.get(world.path("persistentvolumeclaims", "training"))
        assert made
        return str(made["metadata"]["uid"])

    def hosted(self, node: str) -> set[str]:
        """The sessions with a pod on this node."""
        place = self.nodes.index(node)
        return {_session(number) for number in range(self.sessions) if number % len(self.nodes) == place}

    def replaced(self, sessions: set[str]) -> bool:
        """Whether each of these has a pod of its second attempt."""
        pods = self._api.items(f"/api/v1/pods?labelSelector={names.LABEL_ATTEMPT}=2")
        return {f"{session}-a2-0" for session in sessions} <= {pod["metadata"]["name"] for pod in pods}

    def named(self, calls: list[Entry]) -> list[str]:
        """The sessions that these calls are for, once for each call."""
        heads = (re.match(r"s\d+(?=[-.]|$)", call.name) for call in calls if call.verb != "watch")
        return [head.group() for head in heads if head]

    def _listed(self, path: str) -> int:
        found = self._api.get(path)
        assert found
        return 1 + int(found["metadata"].get("remainingItemCount", 0))

    def _add(self, number: int, namespace: str, claim: str) -> None:
        made, name = self._made, _session(number)
        uid, pod_uid = str(uuid.uuid4()), str(uuid.uuid4())
        ip = f"127.{NETWORK}.{number // 200}.{1 + number % 200}"
        old = made.session
        changes = {
            old["metadata"]["uid"]: uid,
            made.pod["metadata"]["uid"]: pod_uid,
            old["status"]["storage"]["claimUID"]: claim,
            made.pod["status"]["podIP"]: ip,
            made.node["metadata"]["name"]: self.nodes[number % len(self.nodes)],
            old["metadata"]["namespace"]: namespace,
            "tuned": name,
        }
        token = session_token(self._master, uid, 1)
        secret = _renamed(made.secret, changes)
        secret["data"] = {names.TOKEN_FIELD: base64.b64encode(token.encode()).decode()}
        self._put(f"{names.GROUP}/{names.TRAINING_SESSION_PLURAL}/{namespace}/{name}", _renamed(old, changes))
        self._put(f"pods/{namespace}/{name}-a1-0", _renamed(made.pod, changes))
        self._put(f"secrets/{namespace}/{name}-a1-token", secret)
        self._lines.append(f"{ip} {token} {json.dumps(_renamed(made.report, changes))}\n")

    def _put(self, key: str, body: Body) -> None:
        body.get("metadata", {}).pop("resourceVersion", None)
        self._puts.append((f"/registry/{key}", body))
        if len(self._puts) == PUTS_AT_A_TIME:
            self._flush()

    def _flush(self) -> None:
        def encoded(text: str) -> str:
            return base64.b64encode(text.encode()).decode()

        puts = [{"requestPut": {"key": encoded(key), "value": encoded(json.dumps(body))}} for key, body in self._puts]
        if puts:
            with httpx.Client(trust_env=False, timeout=60) as client:
                client.post(f"{self._plane.etcd}/v3/kv/txn", json={"success": puts}).raise_for_status()
        self._puts = []


def _session(number: int) -> str:
    return f"s{number:05}"


def _renamed(body: Body, changes: dict[str, str]) -> Body:
    text = json.dumps(body)
    for before, after in changes.items():
        text = text.replace(before, after)
    changed: Body = json.loads(text)
    return changed


class Trainers:
    """The program that answers for all pods."""

    def __init__(self, fleet: Fleet, log: Path) -> None:
        self._seen = log.with_suffix(".seen")
        with log.open("wb") as file:
            command = [sys.executable, str(TRAINERS), str(fleet.trainers), str(self._seen)]
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        eventually("the trainers listen", self._seen.exists, 60)

    def asked(self) -> int:
        """How many pods have been asked."""
        return int(self._seen.read_text())

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def answering(fleet: Fleet, log: Path) -> Iterator[Trainers]:
    trainers = Trainers(fleet, log)
    try:
        yield trainers
    finally:
        trainers.stop()
