"""The cluster that the matrix plays on: what is on the volume, which processes there are, how things die and return."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo import install
from devcluster.processes import Process, start_ticks
from tests.e2e.waiting import eventually
from tests.e2e.world import Everloop
from tests.matrix import pod as pods
from tests.matrix.moments import Facts, Moment, gather
from tests.matrix.pod import Pod
from tests.matrix.victims import BESIDE, CONTROL_PLANE, SERVES_ON, Victim

TAKEOVER_SECONDS = 400.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A serving session on a cluster."""

    everloop: Everloop
    rng: random.Random

    # --- looking ---

    def facts(self) -> Facts:
        """What the journal says now."""
        return gather(self.everloop.session.journal())

    def manifests(self) -> list[str]:
        """Request ids of all checkpoints that count."""
        found = self.everloop.session.lineage_root.glob("models/*/checkpoints/weights/*/manifest.json")
        return [json.loads(path.read_text())["operation"] for path in found]

    def pod(self) -> Pod:
        """The session's pod, once it serves with all its processes. Raises TimeoutError."""
        return eventually(self._pod, "the session to serve with all its processes", TAKEOVER_SECONDS)

    def _pod(self) -> Pod | None:
        try:
            status = self.everloop.session.status()
        except RuntimeError:  # the API server is among the victims
            return None
        serving = any(c["type"] == "Serving" and c["status"] == "True" for c in status.get("conditions", []))
        if not serving or self.facts().attempt != status["attempt"]:
            return None
        return self.processes(status)

    def processes(self, status: dict[str, Any]) -> Pod | None:
        """The pod that a status names, once it has all its processes, whether it serves or not."""
        name, node = status.get("pod", {}).get("name"), status.get("pod", {}).get("node")
        return pods.find(name, node, self.everloop.session.pids(name)) if name and node else None

    # --- killing ---

    def strike(self, victim: Victim, moment: Moment, pod: Pod) -> Callable[[], str]:
        """Kill; returns what is to be done next: it lets go what was held, or heals a node once another took over.

        That returns what a zombie logged.
        """
        cluster = self.everloop.session.cluster
        inside = {Victim.ENGINE: pod.engine, Victim.SPARE: pod.spare, Victim.SERVER: pod.server}
        if victim in inside:
            inside[victim].kill()
            return lambda: _release(pod)
        if victim in BESIDE:
            self.strike_beside(victim, everyone=moment == Moment.ACCEPTED)
            return lambda: _release(pod)
        match victim:
            case Victim.SUPERVISOR:
                pod.supervisor.kill()
                return lambda: ""
            case Victim.POD:
                # A deletion alone would let the server finish what it runs: the container dies first.
                pod.supervisor.kill()
                self._delete(pod)
                return lambda: ""
            case Victim.NODE:
                cluster.node_kill(pod.node)
                return lambda: self._heal_once_taken_over(pod)
            case Victim.PARTITION:
                held, other = (pod.engine, pod.server) if moment in SERVES_ON else (pod.server, pod.engine)
                pods.stop(held)
                cluster.node_partition(pod.node)
                pods.go_on(other)
                return lambda: self._let_zombie_go(pod)
            case Victim.FREEZE:
                cluster.node_freeze(pod.node)
                return lambda: self._thaw(pod)
        raise AssertionError(victim)

    def strike_beside(self, victim: Victim, replica: str | None = None, *, everyone: bool = False) -> None:
        """Kill a victim outside of the session's pod: of several replicas the named one, every one, or any."""
        cluster = self.everloop.session.cluster
        if victim in CONTROL_PLANE:
            eventually(lambda: cluster.component(victim), f"{victim} to run").kill()
            return
        running = eventually(lambda: self._replicas(victim), f"the {victim} to run")
        for name in sorted(running) if everyone else [replica or self.rng.choice(sorted(running))]:
            running[name].kill()

    def bring_operator(self, node: str) -> None:
        """Have the operator run on this node: frozen with it, one with a view of the world gone by comes back."""
        tools, own = self.everloop.session.tools, ("-n", install.RELEASE_NAMESPACE)
        others = [other for other in self.everloop.session.cluster.settings.nodes if other != node]
        for other in others:
            tools.kube("cordon", other)
        try:
            for name, there in self._operators().items():
                if there != node:
                    tools.kube(*own, "delete", "pod", name)
            eventually(lambda: set(self._operators().values()) == {node}, f"the operator to run on {node}", 60)
        finally:
            for other in others:
                tools.kube("uncordon", other)

    def _operators(self) -> dict[str, str]:
        """By pod of the operator that is ready, its node."""
        return {
            item["metadata"]["name"]: item["spec"]["nodeName"]
            for item in self._pods_of("operator")
            if any(c["type"] == "Ready" and c["status"] == "True" for c in item["status"].get("conditions", []))
        }

    def _pods_of(self, component: str) -> list[dict[str, Any]]:
        selector = f"app.kubernetes.io/component={component}"
        found: list[dict[str, Any]] = self.everloop.session.tools.get(
            "-n", install.RELEASE_NAMESPACE, "pods", "-l", selector
        )["items"]
        return found

    def _replicas(self, component: str) -> dict[str, Process] | None:
        """By pod, the first process of the operator or of each replica of the gateway that runs; None if none does."""
        running = {}
        for name in [item["metadata"]["name"] for item in self._pods_of(component)]:
            pids = self.everloop.session.cluster.container_pids(name, install.RELEASE_NAMESPACE)
            if pids and (ticks := start_ticks(pids[0])) is not None:
                running[name] = Process(pids[0], ticks)
        return running or None

    def _delete(self, pod: Pod) -> None:
        self.everloop.session.tools.kube(
            "-n",
            self.everloop.session.namespace,
            "delete",
            "pod",
            pod.name,
            "--grace-period=0",
            "--force",
            "--ignore-not-found",
        )

    def _taken_over(self, attempt: int) -> None:
        eventually(lambda: self.facts().attempt > attempt, "another pod to take over", TAKEOVER_SECONDS)

    def _heal_once_taken_over(self, pod: Pod) -> str:
        self._taken_over(self._attempt(pod))
        self.everloop.session.cluster.node_heal(pod.node)
        return ""

    def _let_zombie_go(self, pod: Pod) -> str:
        """Let what was held of the cut-off pod go on once it has a successor; it must end, and the node return."""
        self._taken_over(self._attempt(pod))
        _release(pod)
        self._gone(pod)
        logs = (self.everloop.session.cluster.root / "nodes" / pod.node / "logs").glob(
            f"{self.everloop.session.namespace}_{pod.name}_*/**/*.log"
        )
        words = "\n".join(log.read_text() for log in logs)
        self.everloop.session.cluster.node_heal(pod.node)
        return words

    def _thaw(self, pod: Pod) -> str:
        self._taken_over(self._attempt(pod))
        self.everloop.session.cluster.node_thaw(pod.node)
        self._gone(pod)
        return ""

    def _attempt(self, pod: Pod) -> int:
        return int(pod.name.rpartition("-a")[2].partition("-")[0])

    def _gone(self, pod: Pod) -> None:
        eventually(lambda: not any(process.alive() for process in pod.all()), "the end of the fenced zombie", 120)

    def nodes_ready(self) -> None:
        """Wait until every node is back: those that the session lost lately it avoids, if there is another."""
        cluster = self.everloop.session.cluster
        eventually(lambda: all(map(cluster.is_node_ready, cluster.settings.nodes)), "all nodes to be Ready", 120)


def _release(pod: Pod) -> str:
    for process in (pod.engine, pod.server):
        pods.go_on(process)
    return ""
