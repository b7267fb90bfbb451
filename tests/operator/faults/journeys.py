"""What the operator is watched at: from a new object to a second attempt after the loss of a node, and to its end."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from everloop_operator.api import names
from tests.operator.faults.proxy import Call
from tests.operator.world import RELEASE, SESSIONS, World, eventually, session_body

PATIENCE_SECONDS = 75.0
"""Twice the operator's own time limit on a call, and its pauses."""
QUIET_SECONDS = 1.5
MORE_WRITES = 8
"""How many writes more than in an unbroken run one fault may cost: a pass is repeated once or twice."""


class Journey:
    """One object in a namespace of its own."""

    name = "tuned"
    secrets: tuple[str, ...] = ("tuned-a2-token",)

    def __init__(self, world: World, nodes: tuple[str, str] = ("a", "b")) -> None:
        self.world = world
        self._nodes = nodes

    def run(self) -> None:
        """Through to the second attempt. Raises AssertionError where the operator does not get there."""
        world = self.world
        if not world.api.items(world.path("persistentvolumeclaims")):
            world.claims()
        self.first, self.second = (world.node(suffix) for suffix in self._nodes)
        self.create()
        self.play(1, self.first)
        world.set_ready(self.first, "Unknown")
        self.play(2, self.second)
        self.clean_up()

    def create(self) -> None:
        self.world.create_session(self.name, pod={"disruptionBudget": True})

    def play(self, attempt: int, node: str) -> None:
        """The part of scheduler, kubelet and trainer."""
        self.serve(f"{self.name}-a{attempt}-0", node)
        self.world.wait_phase(names.PHASE_RUNNING, self.name, PATIENCE_SECONDS)

    def serve(self, pod: str, node: str) -> None:
        attempt = int(pod.split("-a")[1].split("-")[0])
        self.await_pod(pod)
        told = f"attempt {attempt} in the status"
        eventually(told, lambda: self.world.status(self.name).get("attempt", 0) >= attempt, PATIENCE_SECONDS)
        self.world.run_pod(pod, node)

    def await_pod(self, name: str) -> None:
        self.wait(f"pod {name}", lambda: self.world.pod(name) is not None)

    def wait(self, what: str, probe: Callable[[], bool]) -> None:
        """Raises AssertionError with what is told of the object."""
        try:
            eventually(f"{self.world.namespace}: {what}", probe, PATIENCE_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.told()}") from None

    def told(self) -> str:
        return str(self.world.status(self.name))

    def clean_up(self) -> None:
        """The pods of the lost node are to be deleted, and their secrets."""
        for pod in self.world.pods():
            name = pod["metadata"]["name"]
            if name.startswith(self.name) and "-a1" in name:
                eventually(f"deletion of {name}", partial(self.world.deleting, name), PATIENCE_SECONDS)
                self.world.remove_pod(name)
        eventually(f"secrets {self.secrets}", lambda: self.own("secrets") == set(self.secrets), PATIENCE_SECONDS)

    def found(self, plural: str) -> set[str]:
        """Names of what there is in the namespace."""
        listed = self.world.api.items(self.world.path(plural))
        return {
            item["metadata"]["name"] for item in listed if names.LABEL_MANAGED_BY in item["metadata"].get("labels", {})
        }

    def own(self, plural: str) -> set[str]:
        return {name for name in self.found(plural) if name.startswith(self.name)}

    def judge(self, written: list[Call], unbroken_writes: int) -> None:
        """Raises AssertionError where something is not as after an unbroken run.

        Args:
            written: the operator's writes in this namespace.
            unbroken_writes: how many there are at most when nothing goes wrong.
        """
        world = self.world
        status = world.status(self.name)
        recoveries = [(entry["reason"], entry["node"]) for entry in status["recoveries"]]
        assert recoveries == [(names.RECOVERY_NODE_LOST, self.first)]
        assert (status["attempt"], status["recoveryCount"]) == (2, 1)
        assert (status["pod"]["name"], status["pod"]["node"]) == (f"{self.name}-a2-0", self.second)
        assert {item["type"]: item["status"] for item in status["conditions"]}[names.CONDITION_SERVING] == "True"
        assert self.found("pods") == self.pods()
        told = Counter((event["involvedObject"]["kind"], event["reason"], event["message"]) for event in world.events())
        assert max(told.values()) == 1, told
        assert not [call for call in written if "-a3" in call.path]
        assert len(written) <= unbroken_writes + MORE_WRITES, [str(call) for call in written]

    def pods(self) -> set[str]:
        return {f"{self.name}-a2-0"}


class EndingJourney(Journey):
    """A session that a gateway made is stopped; its time is over at once, so that the operator deletes it.

    Its finalizer is set at first, and taken away when there is nothing to wait for any more.
    """

    name = "brief"

    def run(self) -> None:
        world = self.world
        world.claims()
        self.first = world.node(self._nodes[0])
        self.create()
        self.play(1, self.first)
        assert world.session(self.name)["metadata"]["finalizers"] == [names.FINALIZER_COPIES]
        world.api.merge(self.path, {"spec": {"stop": True}})
        pod = f"{self.name}-a1-0"
        self.wait(f"deletion of {pod}", lambda: world.deleting(pod))
        world.remove_pod(pod)
        self.wait("the end of the session", lambda: world.api.get(self.path) is None)

    def create(self) -> None:
        body = session_body(self.name, deletion={"waitForCopies": True}, ttlSecondsAfterFinished=0)
        body["metadata"]["labels"] = {names.LABEL_CREATED_BY: names.CREATED_BY_GATEWAY}
        self.world.api.create(self.world.sessions_path, body)

    @property
    def path(self) -> str:
        return f"{self.world.sessions_path}/{self.name}"

    def told(self) -> str:
        return str(self.world.api.get(self.path))

    def judge(self, written: list[Call], unbroken_writes: int) -> None:
        told = Counter((event["reason"], event["message"]) for event in self.world.events())
        assert max(told.values()) == 1, told
        assert (self.world.api.get(self.path), self.found("pods")) == (None, set())
        assert not [call for call in written if "-a2" in call.path]
        assert len(written) <= unbroken_writes + MORE_WRITES, [str(call) for call in written]


class JobJourney(Journey):
    """An RLJob with a session of its own, whose driver is lost with its node too; then it is deleted."""

    name = "poems"
    secrets = ("poems-a2-token", "poems-driver-a2")

    def create(self) -> None:
        template = {"spec": session_body()["spec"]}
        body: dict[str, Any] = {
            "apiVersion": names.API_VERSION,
            "kind": names.RL_JOB_KIND,
            "metadata": {"name": self.name},
            "spec": {
                "session": {"template": template},
                "runner": {"image": "loop:1", "command": ["python", "loop.py"]},
            },
        }
        self.world.api.create(self.jobs, body)

    @property
    def jobs(self) -> str:
        return f"{SESSIONS}/namespaces/{self.world.namespace}/{names.RL_JOB_PLURAL}"

    def job(self) -> dict[str, Any]:
        return dict((self.world.api.get(f"{self.jobs}/{self.name}") or {}).get("status") or {})

    def play(self, attempt: int, node: str) -> None:
        self.serve(f"{self.name}-a{attempt}-0", node)
        driver = f"{self.name}-driver-a{attempt}"
        self.await_pod(driver)
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": driver}, "target": target}
        self.world.api.create(self.world.path("pods", driver) + "/binding", binding)
        eventually("the driver's node", lambda: (self.job().get("pod") or {}).get("node") == node, PATIENCE_SECONDS)
        self.world.wait_phase(names.PHASE_RUNNING, self.name, PATIENCE_SECONDS)

    def told(self) -> str:
        return f"{super().told()}; {self.job()}"

    def pods(self) -> set[str]:
        return {f"{self.name}-a2-0", f"{self.name}-driver-a2"}

    def judge(self, written: list[Call], unbroken_writes: int) -> None:
        super().judge(written, unbroken_writes)
        status = self.job()
        assert (status["attempt"], status["pod"]["node"]) == (2, self.second)
        assert len(self.keys()) == 1
        self.end()

    def end(self) -> None:
        """The job is deleted, and its key with it."""
        self.world.api.delete(f"{self.jobs}/{self.name}")
        eventually("the job's key is revoked", lambda: not self.keys(), PATIENCE_SECONDS)

    def keys(self) -> list[str]:
        """The API keys of all jobs of the namespace."""
        found = self.world.api.items(f"/api/v1/namespaces/{RELEASE}/secrets?labelSelector={names.LABEL_JOB_UID}")
        space = base64.b64encode(self.world.namespace.encode()).decode()
        return [item["metadata"]["name"] for item in found if item["data"]["namespace"] == space]
