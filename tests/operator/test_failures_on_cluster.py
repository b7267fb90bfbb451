"""The operator against a real API server, to which the tests write what kubelets say of pods that fail."""

from __future__ import annotations

import pytest

from everloop_operator.core.failure_classes import CLASSES
from tests.operator.test_kubelet_statuses import SHUTTING_DOWN, ended, rejected
from tests.operator.world import World, container, eventually, stamp

pytestmark = pytest.mark.slow


def test_memory_that_runs_out_is_told_and_the_pod_kept(world: World) -> None:
    """`OOMKilled` is the reason of the failure, with what a person can do, and the session serves on in its pod."""
    world.claims()
    node = world.node("a")
    world.create_session()
    world.run_pod("tuned-a1-0", node)
    world.wait_phase("Running")
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "startedAt": stamp(), "finishedAt": stamp()}}
    world.set_pod("tuned-a1-0", **container({"running": {}}, ready=True, lastState=killed, restartCount=1))
    failure = eventually("the failure", lambda: world.status().get("failure"))
    remedy = CLASSES["OutOfMemory"].remedy
    assert (failure["reason"], failure["exitCode"], failure["remedy"]) == ("OutOfMemory", 137, remedy)
    eventually("its event", lambda: [e for e in world.events() if e["message"].startswith("OutOfMemory: ")])
    assert world.pod("tuned-a2-0") is None
    assert world.wait_phase("Running")["budgets"]["infrastructure"]["used"] == 1


def test_a_node_that_shuts_down_is_left_for_another(world: World) -> None:
    """The class is the kubelet's `Terminated`, the event has its words, and the next pod is kept from the node.

    The next kubelet does not admit it for a reason that no list has: that is told as a rejection, and one more follows.
    """
    world.claims()
    first, second = world.node("a"), world.node("b")
    world.create_session()
    world.run_pod("tuned-a1-0", first)
    world.wait_phase("Running")
    world.set_pod("tuned-a1-0", **ended("Terminated", SHUTTING_DOWN))
    assert first in str(world.wait_pod("tuned-a2-0")["spec"]["affinity"])
    entry = eventually("the recovery", lambda: world.status()["recoveries"][-1:])[0]
    assert (entry["reason"], entry["node"]) == ("NodeShutdown", first)
    eventually("its event", lambda: [e for e in world.events() if SHUTTING_DOWN in e["message"]])
    world.bind_pod("tuned-a2-0", second)
    world.set_pod("tuned-a2-0", **rejected("AReasonOfALaterKubelet", "words"))
    world.run_pod("tuned-a3-0", second)
    assert world.wait_phase("Running")["recoveries"][-1]["reason"] == "PodRejected"
