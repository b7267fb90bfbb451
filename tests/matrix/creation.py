"""The moment between a TrainingSession's creation on demand and the answer to the client that asked for a model.

What is in the session's pod, or carries it, is struck once the pod has its engine; what is not, as soon as the
TrainingSession is there. In either case the journal has no result yet and the client has not been told anything.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo import install
from demo.loop import Loop
from everloop_operator.api import names
from tests.e2e.waiting import eventually
from tests.e2e.world import Everloop
from tests.matrix import pod as pods
from tests.matrix.moments import Facts, Moment, flaws
from tests.matrix.play import Actor, Cell, Struck
from tests.matrix.pod import Pod
from tests.matrix.stage import TAKEOVER_SECONDS, Stage
from tests.matrix.victims import BESIDE, Victim, oddities
from tests.prepared import prepared

NEWCOMER = str(Path(__file__).parent / "clients" / "newcomer.py")
MOST_TRIES = 3
"""After so many sessions whose client was answered first, the moment counts as never met."""


class Creations:
    """Lets a client make a session in a namespace of its own for each victim, and strikes before it is answered."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._loss: float | None = None
        self.made: Everloop | None = None
        """The installation with the session that was made last."""

    def strike(self, victim: Victim) -> tuple[Struck, list[str]]:
        """Strike one victim; what happened, and what was wrong.

        Raises:
            RuntimeError: the client saw an exception, or was always answered before it could be struck.
            TimeoutError: something did not come back.
        """
        unbroken = self._unbroken()
        for tried in range(1, MOST_TRIES + 1):
            if (met := self._attempt(victim, tried, unbroken)) is not None:
                return met
        raise RuntimeError(f"{victim}: the client was answered first, {MOST_TRIES} times")

    def _attempt(self, victim: Victim, tried: int, unbroken: float) -> tuple[Struck, list[str]] | None:
        stage, everloop = self._stage, self._stage.everloop
        stage.nodes_ready()
        namespace = f"team-{victim}-{tried}"
        key = _tenant(stage, namespace)
        loop = everloop.script(NEWCOMER, f"{namespace}.log", (install.BASE_MODEL,), key)
        loop.start()
        try:
            ((name, uid),) = made = eventually(
                lambda: _sessions(stage, namespace), "the session to be made", TAKEOVER_SECONDS, pause=0.02
            )
            self.made = replace(everloop, session=replace(everloop.session, namespace=namespace, key=key, name=name))
            there = Stage(self.made, stage.rng)
            struck = _scene(there, loop, Cell(victim, Moment.CREATION), tried)
            if struck is None:
                return None
            loss = Actor(loop).hear(TAKEOVER_SECONDS)["loss"]
            list(loop.follow())
        finally:
            loop.stop()
        wrong = flaws(there.facts(), there.manifests())
        if (accepted := list(there.facts().kinds.values()).count("create_model")) != 1:
            wrong.append(f"{accepted} models were made")
        if (after := eventually(lambda: _sessions(stage, namespace), "the API server to answer")) != made:
            wrong.append(f"sessions {made} became {after}")
        if (bound := _bindings(there)) != [uid]:
            wrong.append(f"the session is {uid}, models are bound to {bound}")
        if loss != unbroken:
            wrong.append(f"the client's loss was {loss}, unbroken {unbroken}")
        everloop.session.tools.kube("delete", "namespace", namespace, "--wait=false")
        return struck, wrong

    def _unbroken(self) -> float:
        """What a newcomer is told by the session that has always been there."""
        if self._loss is None:
            everloop = self._stage.everloop
            loop = everloop.script(NEWCOMER, "newcomer.log", (install.BASE_MODEL,), everloop.session.key)
            loop.start()
            try:
                actor = Actor(loop)
                actor.hear()
                self._loss = float(actor.hear()["loss"])
                list(loop.follow())
            finally:
                loop.stop()
        return self._loss


def _scene(stage: Stage, loop: Loop, cell: Cell, tried: int) -> Struck | None:
    """Strike, if nothing has a result and the client was not told anything yet, and hear on until it was."""
    if cell.victim in BESIDE:
        replica = eventually(lambda: _maker(stage), "the gateway's word") if cell.victim == Victim.GATEWAY else None
        if _answered(_facts(stage), loop):
            return None
        # Its first start, which is still to come.
        node, before = "", Facts(incarnation=1, attempt=1)
        at, words = time.time(), ""
        stage.strike_beside(cell.victim, replica)
    else:
        pod = _hold_new_pod(stage)
        node, before = pod.node, _facts(stage)
        if _answered(before, loop):
            pods.go_on(pod.engine)
            return None
        at = time.time()
        words = stage.strike(cell.victim, cell.moment, pod)()
    told = Actor(loop).hear(TAKEOVER_SECONDS)
    keys = list(before.kinds)
    odd = tuple(oddities(cell.victim, cell.moment, before, stage.facts(), keys))
    return Struck(cell, tried, tuple(keys), told["time"] - at, odd, node, before.attempt, before.incarnation, words)


def _answered(facts: Facts, loop: Loop) -> bool:
    return bool(facts.results) or not loop.lines.empty()


def _hold_new_pod(stage: Stage) -> Pod:
    """The new session's pod with all its processes, the engine stopped as soon as it is there."""
    session = stage.everloop.session
    status = eventually(lambda: _with_pod(session.status()), "a pod in the new session's status", TAKEOVER_SECONDS)
    name = status["pod"]["name"]
    spare = eventually(lambda: pods.find_spare(session.pids(name)), "the new pod's spare", TAKEOVER_SECONDS)

    def held() -> Pod | None:
        engine = pods.find_engine(spare)
        if engine is None:
            return None
        pods.stop(engine)
        return stage.processes(status)

    return eventually(held, "the new pod's processes", TAKEOVER_SECONDS, pause=0.001)


def _with_pod(status: dict[str, Any]) -> dict[str, Any] | None:
    pod = status.get("pod", {})
    return status if pod.get("name") and pod.get("node") else None


def _facts(stage: Stage) -> Facts:
    """The journal's facts; none while there is no journal."""
    try:
        return stage.facts()
    except FileNotFoundError:
        return Facts()


def _maker(stage: Stage) -> str | None:
    """The gateway's replica that logged that it created the session."""
    session = stage.everloop.session
    for log in (session.cluster.root / "nodes").glob(f"*/logs/{install.RELEASE_NAMESPACE}_everloop-gateway-*/**/*.log"):
        lines = log.read_text().splitlines()
        if any('"session created"' in line and f'"{session.namespace}"' in line for line in lines):
            return log.relative_to(session.cluster.root / "nodes").parts[2].split("_")[1]
    return None


def _tenant(stage: Stage, namespace: str) -> str:
    """A namespace whose key may make sessions; the key."""
    session = stage.everloop.session
    training = session.cluster.shared / "training"
    key = install.make_tenant(session.tools, namespace, training=training, models=prepared().model.parent)
    install.allow_sessions(session.tools, namespace)
    return key


def _sessions(stage: Stage, namespace: str) -> list[tuple[str, str]] | None:
    """Name and UID of each TrainingSession; None if there is none, or the API server does not answer."""
    try:
        items = stage.everloop.session.tools.get("-n", namespace, "tsess")["items"]
    except RuntimeError:  # the API server is among the victims
        return None
    return [(item["metadata"]["name"], item["metadata"]["uid"]) for item in items] or None


def _bindings(stage: Stage) -> list[str]:
    """The UID that each model of the namespace is bound to."""
    session, selector = stage.everloop.session, f"{names.LABEL_TYPE}={names.TYPE_BINDING}"
    return [m["data"]["uid"] for m in session.tools.get("-n", session.namespace, "configmaps", "-l", selector)["items"]]
