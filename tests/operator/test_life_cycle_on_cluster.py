"""Life cycle against a real API server: the tests play people, scheduler, kubelets and trainers."""

from __future__ import annotations

import pytest

from everloop_operator.api import names
from tests.operator.world import World, eventually

pytestmark = pytest.mark.slow


def merge(world: World, **spec: object) -> None:
    world.api.merge(f"{world.sessions_path}/tuned", {"spec": spec})


def test_suspended_resumed_and_stopped(world: World) -> None:
    """The pod goes behind its snapshots and comes back as the next attempt; stopped, it goes with its token."""
    world.claims()
    node = world.node("a")
    world.create_session()
    trainer = world.run_pod("tuned-a1-0", node)
    world.wait_phase("Running")
    merge(world, suspend=True)
    eventually("deletion", lambda: world.deleting("tuned-a1-0"))
    assert [name.partition("-")[0] for name in trainer.snapshots] == ["suspend"]
    world.wait_phase("Stopping")
    world.remove_pod("tuned-a1-0")
    status = world.wait_phase("Suspended")
    assert (status.get("pod"), world.condition("Ready")["status"], world.pods()) == (None, "True", [])
    merge(world, suspend=False)
    world.run_pod("tuned-a2-0", node)
    status = world.wait_phase("Running")
    assert (status["attempt"], status["recoveryCount"], status.get("rest")) == (2, 0, None)
    merge(world, stop=True)
    eventually("deletion", lambda: world.deleting("tuned-a2-0"))
    world.remove_pod("tuned-a2-0")
    world.wait_phase("Stopped")
    secrets = world.path("secrets")
    eventually("removal of the tokens", lambda: not [s for s in world.api.items(secrets) if "token" in str(s)])
    answer = world.api.request(
        "PATCH", f"{world.sessions_path}/tuned", {"spec": {"stop": False}}, "application/merge-patch+json"
    )
    assert answer.status_code == 422
    assert "spec.stop cannot be taken back" in answer.text
    told = {names.EVENT_SUSPENDED, names.EVENT_RESUMED, names.EVENT_STOPPED}
    eventually("events", lambda: told <= {event["reason"] for event in world.events()})
