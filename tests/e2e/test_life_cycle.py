"""One loop through the whole life of its session: suspended, given another image, idle, woken; another one stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bootstrap.images import TRAINER_IMAGE
from demo import adapters
from demo.loop import Loop
from demo.session import MANIFEST
from everloop_operator.api import names
from tests.e2e.waiting import eventually
from tests.e2e.world import NAMESPACE, Everloop
from tests.soak.ledger import done_twice

pytestmark = pytest.mark.cluster

NAME = "life"
GATEWAY = "system:serviceaccount:everloop-system:everloop-gateway"
BATCH = ("--batch", "1", "--length", "16")


@pytest.fixture
def life(everloop: Everloop) -> Iterator[Everloop]:
    """A second session of the namespace, the one that new models go to; gone afterwards."""
    session = replace(everloop.session, name=NAME)
    labels = {names.LABEL_DEFAULT: "true"}
    changes = json.dumps({"metadata": {"name": NAME, "labels": labels}, "spec": {"idle": {"afterSeconds": 0}}})
    manifest = session.tools.kube("patch", "--local", "-f", str(MANIFEST), "--type=merge", "-p", changes, "-o", "json")
    session.tools.kube("-n", NAMESPACE, "apply", "-f", "-", stdin=manifest)
    try:
        session.wait_serving()
        yield replace(everloop, session=session)
    finally:
        session.tools.kube("-n", NAMESPACE, "delete", "tsess", NAME, "--ignore-not-found")


def suspend_as(life: Everloop, user: str) -> None:
    """As one who may change it, but not read it first as `kubectl patch` does. Raises RuntimeError."""
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.TRAINING_SESSION_KIND,
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"suspend": True},
    }
    arguments = ("apply", "--server-side", "--force-conflicts", f"--as={user}", "-f", "-")
    life.session.tools.kube(*arguments, stdin=json.dumps(body))


def change(life: Everloop, spec: dict[str, Any]) -> None:
    body = json.dumps({"spec": spec})
    life.session.tools.kube("-n", NAMESPACE, "patch", "tsess", NAME, "--type=merge", "-p", body)


def wait_phase(life: Everloop, phase: str) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        status = life.session.status()
        return status if status["phase"] == phase else None

    return eventually(reached, f"phase {phase}", 180)


def pods(life: Everloop) -> list[str]:
    chosen = ("-n", NAMESPACE, "pods", "-l", f"{names.LABEL_SESSION}={NAME}")
    return [pod["metadata"]["name"] for pod in life.session.tools.get(*chosen)["items"]]


def steps(everloop: Everloop, name: str) -> list[dict[str, Any]]:
    return [entry for entry in everloop.ledger(name) if entry["event"] == "step"]


def wait_step(life: Everloop, loop: Loop, name: str) -> None:
    """Until the loop has done one more step."""
    known = len(steps(life, name))

    def more() -> bool:
        assert loop.process is not None
        assert loop.process.poll() is None, loop.log.read_text()[-2000:]
        return len(steps(life, name)) > known

    eventually(more, "the loop's next step", 180)


def test_a_loop_lives_through_everything_that_its_session_goes_through(everloop: Everloop, life: Everloop) -> None:
    """Suspend, resume, another image, idle and wake: bit-equal to an unbroken run; stop ends the next loop in words."""
    end = life.directory / "end-life"
    loop = life.loop("life", "--steps", "100000", "--until", str(end), *BATCH)
    (life.directory / "life.ledger").touch()
    loop.start()
    try:
        wait_step(life, loop, "life")
        change(life, {"suspend": True})
        status = wait_phase(life, "Suspended")
        assert (pods(life), status["attempt"]) == ([], 1)
        change(life, {"suspend": False})
        wait_step(life, loop, "life")

        change(life, {"image": TRAINER_IMAGE})
        eventually(lambda: life.session.status()["attempt"] == 3, "the next attempt", 60)
        wait_step(life, loop, "life")

        assert loop.process is not None
        loop.process.send_signal(signal.SIGSTOP)
        change(life, {"idle": {"afterSeconds": 3}})
        wait_phase(life, "Idle")
        assert pods(life) == []
        with pytest.raises(RuntimeError, match="the gateway changes no spec"):
            suspend_as(life, GATEWAY)
        change(life, {"idle": {"afterSeconds": 600}})
        loop.process.send_signal(signal.SIGCONT)
        wait_step(life, loop, "life")
        end.touch()
        list(loop.follow())
    finally:
        loop.stop()
    status = wait_phase(life, "Running")
    assert [(entry["reason"], entry["lostOperations"]) for entry in status["recoveries"]] == [("SpecChanged", 0)]
    assert done_twice(life.session.journal()) == []
    stopped = life.loop("stopped", "--steps", "100000", *BATCH)
    (life.directory / "stopped.ledger").touch()
    stopped.start()
    try:
        wait_step(life, stopped, "stopped")
        change(life, {"stop": True})
        with pytest.raises(RuntimeError, match=r"RequestFailedError.*TrainingSession team-e2e/life is Stopp"):
            list(stopped.follow())
    finally:
        stopped.stop()
    wait_phase(life, "Stopped")

    assert adapter(life, "life") == unbroken(everloop, life, len(steps(life, "life")))


def adapter(session: Everloop, name: str) -> tuple[list[float], str]:
    """Losses and fingerprint of the adapter that a loop saved at last."""
    ledger = session.ledger(name)
    path = [entry["path"] for entry in ledger if entry["event"] == "saved"][-1]
    losses = [entry["loss"] for entry in ledger if entry["event"] == "step"]
    return losses, adapters.fingerprint(session.session.adapter(path))


def unbroken(everloop: Everloop, life: Everloop, count: int) -> tuple[list[float], str]:
    """The same of as many steps in the other session of the namespace, which nobody disturbs."""
    life.session.tools.kube("-n", NAMESPACE, "label", "tsess", NAME, f"{names.LABEL_DEFAULT}-")
    loop = everloop.loop("life-unbroken", "--steps", str(count), *BATCH)
    loop.start()
    try:
        list(loop.follow())
    finally:
        loop.stop()
    return adapter(everloop, "life-unbroken")
