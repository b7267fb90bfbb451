"""`spec.pod.disruptionBudget`: evictions wait, and a drain does not wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.training_session_status import TrainingSessionStatus
from everloop_operator.core import children
from everloop_operator.core.node_rules import DRAIN, Severity, Signal, signals
from everloop_operator.core.observed import Node, Observed, Trainer
from tests.operator import builders
from tests.operator.builders import ago, decided, node, pod, report, session, spec, status_of
from tests.operator.world import World, eventually

OVERLAY = {"disruptionBudget": True}


def cordoned(seconds: float, name: str = "node-a") -> Node:
    """A node that has been cordoned for so long."""
    body = {"metadata": {"name": name}, "spec": {"unschedulable": True}}
    return node(name, signals=signals(body, [DRAIN], now=ago(seconds)))


def cordoned70(name: str) -> Node:
    return cordoned(70, name)


def on(*nodes: Node, overlay: dict[str, Any] = OVERLAY, **changes: Any) -> Observed:
    """A serving session whose pod is on node-a."""
    return builders.observed(
        session=session(TrainingSessionStatus(attempt=1), pod=overlay),
        pods=(pod(template_hash=children.template_hash(spec(pod=overlay))),),
        nodes={each.name: each for each in nodes},
        hosting={each.name: 1 for each in nodes},
        trainer=Trainer(report=report(**changes)),
    )


def test_the_budget_is_of_one_pod() -> None:
    """It selects that pod alone, goes with it, and there is none unless it is asked for."""
    body = decided(on(node())).disruption_budget
    assert body is not None
    labels = children.pod(session(), spec(), 1, image="i", avoid=(), shun=())["metadata"]["labels"]
    chosen = body["spec"]["selector"]["matchLabels"]
    assert chosen.items() <= labels.items()
    assert not chosen.items() <= {**labels, names.LABEL_ATTEMPT: "2"}.items()
    [owner] = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Pod", "uid-pod-1")
    assert decided(on(node(), overlay={})).disruption_budget is None


def test_a_drained_node_is_left_after_a_minute() -> None:
    """First the snapshots are asked for, then another pod takes over: the drain ends."""
    early = decided(on(cordoned(59)))
    assert (early.create_pod, early.poll and early.poll.snapshot, early.requeue_after) == (None, "", 1.0)
    asked = decided(on(cordoned(61)))
    assert asked.create_pod is None
    assert asked.poll is not None
    written = on(cordoned(61), snapshotRequest={"id": asked.poll.snapshot, "pending": 0})
    result = decided(written)
    assert result.create_pod is not None
    assert [deletion.name for deletion in result.delete_pods] == ["tuned-a1-0"]
    assert status_of(result).recoveries[-1].rule == DRAIN.name


def test_without_a_budget_a_cordon_moves_nothing() -> None:
    """An eviction is let through at once then, and loses nothing."""
    result = decided(on(cordoned(70), overlay={}))
    assert (result.create_pod, result.poll and result.poll.snapshot) == (None, "")


def flagged(name: str) -> Node:
    return node(name, signals=(Signal("r", Severity.MOVE_NOW, "sick", since=ago(70), due=ago(10)),))


@pytest.mark.parametrize("other", [cordoned70, flagged])
def test_a_drain_is_not_held_back(other: Callable[[str], Node]) -> None:
    """Who drains a whole fleet waits for each of its sessions: the fleet cap is for what rules find."""
    asked = decided(on(cordoned(70), *(other(f"node-{number}") for number in range(10))))
    assert asked.poll is not None
    assert asked.poll.snapshot


def test_drained_nodes_hold_no_rule_back() -> None:
    """They do not count as nodes that a rule would have left."""
    assert (
        decided(on(flagged("node-a"), *(cordoned70(f"node-{number}") for number in range(10)))).create_pod is not None
    )


def test_evictions_are_held_back_by_the_api_server(world: World) -> None:
    """The real API server refuses to evict the pod with a budget, and would evict the other."""
    world.claims()
    here = world.node("a")
    for name, overlay in (("kept", OVERLAY), ("let-go", {})):
        world.create_session(name, pod=overlay)
        world.run_pod(f"{name}-a1-0", here)
    budget = eventually("the budget", lambda: world.api.get(_budgets(world, "/kept-a1-0")))
    assert budget["metadata"]["ownerReferences"][0]["kind"] == "Pod"
    assert _evict(world, "kept-a1-0").status_code == 429
    assert _evict(world, "let-go-a1-0").status_code == 201
    assert [item["metadata"]["name"] for item in world.api.items(_budgets(world))] == ["kept-a1-0"]


def _budgets(world: World, name: str = "") -> str:
    return f"/apis/policy/v1/namespaces/{world.namespace}/poddisruptionbudgets{name}"


def _evict(world: World, name: str) -> Any:
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name},
        "deleteOptions": {"dryRun": ["All"]},
    }
    return world.api.request("POST", world.path("pods", name) + "/eviction", eviction)
