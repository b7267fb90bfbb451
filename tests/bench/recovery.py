"""How long it takes to come back, by the clocks of those who come back: the log of the session pods, the node's status.

On the local cluster one loop runs without end while engine, server, spare, pod and node are killed in turn, the node
also with the operator on it, which then has to come back first. Counted is
from the kill (for a node from the moment that the control plane gave its condition Ready, in whole seconds, rounded
down: up to a second too long) until every model is restored, and for the spare until it listens again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from demo import faults
from demo.install import RELEASE_NAMESPACE, Tools
from demo.loop import Loop
from demo.moments import running
from tests.bench.measure import Measure
from tests.bench.podlog import Event, events
from tests.e2e.waiting import eventually
from tests.e2e.world import NAMESPACE, Everloop, installed

ROUNDS = 3
GOALS = {"engine": 2.0, "server": 2.0, "spare": 15.0, "pod": 8.0, "node": 8.0, "node of the operator": 8.0}
NODES = ("node", "node of the operator")
NEW_POD = ("pod", *NODES)
OPERATOR = "app.kubernetes.io/component=operator"
PATIENCE = 180.0
_LOADED = re.compile(r"base model \S+ loaded in ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Comeback:
    """Seconds: all of it, and what of it went into importing and loading the base model, and into replay."""

    whole: float
    loading: float
    replay: float
    replayed: int


def run(place: Path) -> list[Measure]:
    """Raises TimeoutError if anything does not come back. `place` is not used: a cluster has a directory of its own."""
    found: dict[str, list[Comeback]] = {victim: [] for victim in GOALS}
    with installed(nodes=3) as everloop:
        stop = everloop.directory / "stop"
        loop = everloop.loop("bench", "--steps", "1000000", "--until", str(stop))
        loop.start()
        try:
            for number in range(ROUNDS):
                for victim in GOALS:
                    found[victim].append(_strike(everloop, loop, victim))
                    print(f"  {number + 1}/{ROUNDS} {victim}: {found[victim][-1]}", flush=True)
            stop.touch()
            list(loop.follow())
        finally:
            loop.stop()
    return [measure for victim, comebacks in found.items() for measure in _measures(victim, comebacks)]


def _measures(victim: str, comebacks: list[Comeback]) -> list[Measure]:
    if victim == "spare":
        return [_slowest("spare killed, until it listens again", [each.whole for each in comebacks], GOALS[victim])]
    begin = "from its node's NotReady" if victim in NODES else "killed"
    beyond, left_out = [each.whole - each.loading - each.replay for each in comebacks], "replay left out"
    if victim in NEW_POD:
        left_out = "import, weight load and replay left out"
    return [
        _slowest(f"{victim}: {begin} until all is restored, {left_out}", beyond, GOALS[victim]),
        _slowest(f"{victim}: {begin} until all is restored, all in", [each.whole for each in comebacks]),
        _slowest(f"{victim}: of which replay", [each.replay for each in comebacks]),
        *([_slowest(f"{victim}: import and weight load", [c.loading for c in comebacks])] if victim in NEW_POD else []),
    ]


def _slowest(what: str, samples: list[float], goal: float | None = None) -> Measure:
    return Measure(f"{what}, slowest of {len(samples)}", max(samples), "s", goal, samples=tuple(samples))


def _strike(everloop: Everloop, loop: Loop, victim: str) -> Comeback:
    """Kill in the middle of an operation, and see when all is as before. Nodes are healed, the loop has gone on."""
    session = everloop.session
    session.wait_serving()
    if victim in NODES:
        _place_operator(everloop, session.status()["pod"]["node"], there=victim != "node")
    _wait_for_steps(everloop, loop, 6)
    pod = session.status()["pod"]
    pids = session.pids(pod["name"])
    now = eventually(lambda: running(session.journal()), "an operation that runs", seconds=PATIENCE)
    began = datetime.now(UTC)
    match victim:
        case "pod":
            faults.kill(pids, "supervisor", now.engine)
            session.tools.kube("-n", NAMESPACE, "delete", "pod", pod["name"], "--grace-period=0", "--force")
        case "node" | "node of the operator":
            session.cluster.node_kill(pod["node"])
            began = eventually(functools.partial(_not_ready, everloop, pod["node"]), "NotReady", seconds=PATIENCE)
        case _:
            faults.kill(pids, victim, now.engine)
    logs = functools.partial(_logs, everloop)
    end = "spare listens" if victim == "spare" else "recovered"
    last = eventually(lambda: _first(events(logs(), began), end), f"{victim} to come back", seconds=PATIENCE)
    between = [event for event in events(logs(), began) if event.time <= last.time]
    if victim in NODES:
        session.cluster.node_heal(pod["node"])
        session.cluster.wait_node(pod["node"], ready=True)
    return comeback(between, began, last.time)


def comeback(between: Iterable[Event], began: datetime, ended: datetime) -> Comeback:
    """What was logged between a kill and the end of the recovery, in figures. Pure."""
    loading = replay = 0.0
    replayed = 0
    for event in between:
        loaded = _LOADED.fullmatch(event.name)
        if loaded is not None:
            loading += float(loaded[1])
        if event.name == "model restored":
            replay += event.fields["replay_seconds"]
            replayed += event.fields["replayed"]
    return Comeback((ended - began).total_seconds(), loading, replay, replayed)


def _place_operator(everloop: Everloop, node: str, *, there: bool) -> None:
    """Let the operator run on this node, or on any other one."""
    tools = everloop.session.tools
    if _runs_on(tools, node) == there:
        return
    names = {each["metadata"]["name"] for each in tools.get("nodes")["items"]}
    closed = names - {node} if there else {node}
    tools.kube("cordon", *closed)
    tools.kube("-n", RELEASE_NAMESPACE, "delete", "pod", "-l", OPERATOR)
    eventually(lambda: _runs_on(tools, node) == there, "the operator on its node", seconds=PATIENCE)
    tools.kube("uncordon", *closed)


def _runs_on(tools: Tools, node: str) -> bool | None:
    """None while there is not one that is ready."""
    pods = tools.get("-n", RELEASE_NAMESPACE, "pods", "-l", OPERATOR)["items"]
    containers = [status for pod in pods for status in pod["status"].get("containerStatuses", ())]
    if len(pods) != 1 or not all(status["ready"] for status in containers) or not containers:
        return None
    return bool(pods[0]["spec"]["nodeName"] == node)


def _first(found: list[Event], name: str) -> Event | None:
    return next((event for event in found if event.name.startswith(name)), None)


def _logs(everloop: Everloop) -> list[Path]:
    return list((everloop.session.cluster.root / "nodes").glob(f"*/logs/{NAMESPACE}_*/**/*.log"))


def _not_ready(everloop: Everloop, node: str) -> datetime | None:
    conditions = everloop.session.tools.get("node", node)["status"]["conditions"]
    ready = next(condition for condition in conditions if condition["type"] == "Ready")
    return None if ready["status"] == "True" else datetime.fromisoformat(ready["lastTransitionTime"])


def _wait_for_steps(everloop: Everloop, loop: Loop, count: int) -> None:
    """Wait until the loop has made so many more steps; raises RuntimeError with its own words if it ended."""
    begun = _steps(everloop)

    def enough() -> bool:
        assert loop.process is not None
        if loop.process.poll() is not None:
            list(loop.follow())
            raise RuntimeError("the loop ended by itself")
        return _steps(everloop) >= begun + count

    eventually(enough, f"{count} more steps of the loop", seconds=PATIENCE)


def _steps(everloop: Everloop) -> int:
    path = everloop.directory / "bench.ledger"
    return sum(entry["event"] == "step" for entry in everloop.ledger("bench")) if path.exists() else 0
