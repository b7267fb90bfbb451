"""When a pod leaves a node for what the rules find at it: at once, after its snapshots, or not at all."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.core.node_rules import NodeRule, Severity, Signal
from everloop_operator.core.observed import Node, Observed, Trainer
from everloop_operator.core.projections import node_of
from tests.operator.builders import NOW, after, ago, condition, decided, node, pod, report, serving, status_of

Moves = Severity.CHECKPOINT_THEN_MOVE


def flagged(severity: Severity, seconds: float = 5.0, name: str = "node-a", **changes: Any) -> Node:
    """A node at which a signal has counted for so long."""
    signal = Signal("the-rule", severity, "label broken=yes", since=ago(seconds), due=ago(seconds))
    return node(name, signals=(signal,), **changes)


def on(*nodes: Node, **changes: Any) -> Observed:
    """A serving session on node-a; the other nodes hold pods of others."""
    names = {each.name: each for each in (*nodes, node("node-z"))}
    hosting = {each.name: 1 for each in nodes}
    return serving(nodes=names, hosting=hosting, **changes)


def test_move_now_replaces_the_pod_at_once() -> None:
    """The next attempt is told off the node, the old pod is deleted, status and events name rule and node."""
    result = decided(on(flagged(Severity.MOVE_NOW)))
    status = status_of(result)
    assert (status.phase, status.attempt) == ("Moving", 2)
    entry = status.recoveries[-1]
    assert (entry.reason, entry.rule, entry.node) == ("NodeHealth", "the-rule", "node-a")
    assert result.create_pod is not None
    affinity = result.create_pod["spec"]["affinity"]["nodeAffinity"]
    for kind in ("required", "preferred"):
        assert "node-a" in str(affinity[f"{kind}DuringSchedulingIgnoredDuringExecution"])
    assert [deletion.name for deletion in result.delete_pods] == ["tuned-a1-0"]
    assert not result.delete_pods[0].force
    assert ("Warning", "NodeUnhealthy") in [(event.type, event.reason) for event in result.events]
    assert any("rule the-rule" in event.message and "label broken=yes" in event.message for event in result.events)
    assert status.budgets is not None
    assert status.budgets.infrastructure.used == 1


def test_the_session_is_moving_until_it_serves_elsewhere() -> None:
    """Phase Moving lasts from the decision to leave until the next attempt serves."""
    first = on(flagged(Severity.MOVE_NOW))
    second = after(first, decided(first), pods=(pod(2, node="node-z", scheduled=ago(1)),), trainer=Trainer())
    assert status_of(decided(second)).phase == "Moving"
    third = replace(second, trainer=Trainer(report=report(2)))
    assert status_of(decided(third)).phase == "Running"


def test_avoid_leaves_a_running_pod_alone() -> None:
    """It is told, and new pods prefer other nodes."""
    first = on(flagged(Severity.AVOID))
    result = decided(first)
    assert (result.create_pod, result.delete_pods, status_of(result).phase) == (None, (), "Running")
    status, reason, message = condition(result, "NodesHealthy")
    assert (status, reason) == ("False", "NodeAvoided")
    assert "other nodes are preferred" in message
    lost_pod = decided(replace(first, pods=()))
    assert lost_pod.create_pod is not None
    affinity = lost_pod.create_pod["spec"]["affinity"]["nodeAffinity"]
    assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]


def test_checkpoint_then_move_waits_for_the_snapshots() -> None:
    """The pod serves on and is asked for snapshots; the next attempt starts when they are written."""
    first = on(flagged(Moves))
    asked = decided(first)
    assert (asked.create_pod, status_of(asked).phase) == (None, "Running")
    assert asked.poll is not None
    assert asked.poll.snapshot
    name = asked.poll.snapshot
    assert condition(asked, "NodesHealthy")[:2] == ("False", "NodeUnhealthy")
    writing = after(first, asked, trainer=Trainer(report=report(1, snapshotRequest={"id": name, "pending": 1})))
    assert decided(writing).create_pod is None
    other = replace(writing, trainer=Trainer(report=report(1, snapshotRequest={"id": "another", "pending": 0})))
    assert decided(other).create_pod is None
    written = replace(writing, trainer=Trainer(report=report(1, snapshotRequest={"id": name, "pending": 0})))
    result = decided(written)
    assert result.create_pod is not None
    assert (status_of(result).phase, status_of(result).recoveries[-1].rule) == ("Moving", "the-rule")


def test_checkpoint_then_move_does_not_wait_for_ever() -> None:
    """At the deadline the next attempt starts, whatever the trainer says; until then a pass is due at the deadline."""
    first = on(flagged(Moves))
    asked = decided(first)
    silent = after(first, asked, trainer=Trainer(report=report(1), unreachable_since=ago(1)))
    waiting = decided(silent)
    assert waiting.create_pod is None
    assert waiting.requeue_after is not None
    assert waiting.requeue_after <= 30
    late = replace(silent, now=NOW.replace(second=31))
    assert decided(late).create_pod is not None


def test_a_signal_that_comes_later_has_its_whole_time() -> None:
    """However long something lesser has been said of the node before: the snapshots are waited for."""
    first = on(flagged(Severity.AVOID, seconds=60))
    told = replace(after(first, decided(first)), now=NOW.replace(minute=10))
    worse = Signal("another-rule", Moves, "label worse=yes", since=told.now, due=told.now)
    lesser = first.nodes["node-a"].signals
    moved = replace(told, nodes={**told.nodes, "node-a": node(signals=(*lesser, worse))})
    asked = decided(moved)
    assert asked.create_pod is None
    again = replace(after(moved, asked), now=moved.now.replace(second=20))
    assert decided(again).create_pod is None
    assert decided(replace(again, now=moved.now.replace(second=30))).create_pod is not None


def test_a_healthy_pod_is_not_asked_for_snapshots() -> None:
    """No signal, no request."""
    poll = decided(on(node("node-a"))).poll
    assert poll is not None
    assert not poll.snapshot


def test_a_signal_that_goes_away_in_time_moves_nothing() -> None:
    """What is repaired before the pod has left is forgotten."""
    first = on(flagged(Moves))
    asked = decided(first)
    cured = after(first, asked, nodes={"node-a": node(), "node-z": node("node-z")})
    result = decided(cured)
    assert (result.create_pod, condition(result, "NodesHealthy")[0]) == (None, "True")


def test_a_signal_that_is_not_due_yet_moves_nothing_but_is_waited_for() -> None:
    """The next pass is when it will count."""
    signal = Signal("the-rule", Severity.MOVE_NOW, "x", since=ago(1), due=ago(-9))
    result = decided(on(node(signals=(signal,))))
    assert result.create_pod is None
    assert result.requeue_after == pytest.approx(9)


def test_a_node_that_was_chosen_in_spite_of_its_signal_is_kept() -> None:
    """No better one had room: leaving it again would only lead back."""
    first = on(flagged(Severity.MOVE_NOW, seconds=1000))
    chosen = replace(first, pods=(pod(scheduled=ago(10)),))
    result = decided(chosen)
    assert (result.create_pod, status_of(result).phase) == (None, "Running")


def test_a_monitor_that_starts_anew_moves_a_session_once() -> None:
    """Bad, then its initial value, then bad again: one move, though the next pod comes to the same node."""
    rule = NodeRule(
        name="r", kind="Condition", key="Bad", values=("True",), severity=Severity.MOVE_NOW, recovery_seconds=60
    )

    def shown(status: str, seconds: int, previous: Node | None) -> Observed:
        body = {
            "metadata": {"name": "node-a", "uid": "uid-node-a"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Bad", "status": status}]},
        }
        now = NOW + timedelta(seconds=seconds)
        seen = node_of(body, now=now, rules=[rule], previous=previous)
        return replace(state, now=now, nodes={"node-a": seen}, hosting={"node-a": 1})

    state = on(node("node-a"))
    bad = shown("True", 0, None)
    first = decided(bad)
    assert first.create_pod is not None
    pods = (pod(2, scheduled=NOW + timedelta(seconds=2)),)
    state = after(bad, first, pods=pods, trainer=Trainer(report=report(2)))
    cleared = shown("False", 5, bad.nodes["node-a"])
    state = after(cleared, decided(cleared))
    result = decided(shown("True", 9, cleared.nodes["node-a"]))
    assert (result.create_pod, status_of(result).attempt, status_of(result).recovery_count) == (None, 2, 1)


def test_a_signal_elsewhere_moves_nothing() -> None:
    """A condition that nobody has reset at a node without pods: it is avoided by new pods, and that is all."""
    elsewhere = on(node("node-a"))
    elsewhere = replace(elsewhere, nodes={**elsewhere.nodes, "node-b": flagged(Severity.MOVE_NOW, name="node-b")})
    result = decided(elsewhere)
    assert (result.create_pod, result.delete_pods, status_of(result)) == (None, (), elsewhere.session.status)
    lost_pod = decided(replace(elsewhere, pods=()))
    assert lost_pod.create_pod is not None
    affinity = lost_pod.create_pod["spec"]["affinity"]["nodeAffinity"]
    assert "node-b" in str(affinity["preferredDuringSchedulingIgnoredDuringExecution"])


@pytest.mark.parametrize("severity", [Severity.MOVE_NOW, Moves])
def test_a_rule_that_finds_fault_with_the_fleet_is_held_back(severity: Severity) -> None:
    """Three of four nodes at once are beyond the cap: nothing moves, and the condition says so."""
    nodes = [flagged(severity, name=f"node-{letter}") for letter in "abc"]
    result = decided(on(*nodes, node("node-d")))
    assert (result.create_pod, status_of(result).phase) == (None, "Running")
    assert condition(result, "NodesHealthy")[1:] == (
        "NodeAvoided",
        "node node-a: label broken=yes (rule the-rule); too many nodes show signals to leave it",
    )
    assert result.poll is not None
    assert not result.poll.snapshot


def test_two_nodes_may_always_be_left() -> None:
    """The cap is no obstacle in a small cluster."""
    nodes = [flagged(Severity.MOVE_NOW, name=f"node-{letter}") for letter in "ab"]
    assert decided(on(*nodes, node("node-d"))).create_pod is not None


def test_the_cap_grows_with_the_fleet() -> None:
    """A fifth of 20 nodes may be left, and no more."""
    fleet = [node(f"node-{number}") for number in range(16)]
    bad = [flagged(Severity.MOVE_NOW, name=f"node-{letter}") for letter in "abcd"]
    assert decided(on(*bad, *fleet)).create_pod is not None
    fifth = flagged(Severity.MOVE_NOW, name="node-e")
    assert decided(on(*bad, fifth, *fleet[:-1])).create_pod is None


def test_the_cap_counts_only_nodes_with_session_pods() -> None:
    """What happens elsewhere in the cluster holds nothing back."""
    others = {f"node-{number}": flagged(Severity.MOVE_NOW, name=f"node-{number}") for number in range(9)}
    first = on(flagged(Severity.MOVE_NOW))
    assert decided(replace(first, nodes={**first.nodes, **others})).create_pod is not None


def test_proof_of_death_is_not_held_back() -> None:
    """A node that is gone or out of service is left, whatever else goes on."""
    nodes = [flagged(Severity.MOVE_NOW, name=f"node-{letter}") for letter in "bcd"]
    dead = flagged(Severity.MOVE_NOW, out_of_service=True)
    result = decided(on(dead, *nodes))
    assert result.create_pod is not None
    assert status_of(result).recoveries[-1].reason == "NodeLost"


def test_the_worst_nodes_are_avoided_first_and_not_without_end() -> None:
    """A pod's list of nodes that it would rather not run on is bounded."""
    many = {f"node-{number:03}": flagged(Severity.AVOID, name=f"node-{number:03}") for number in range(100)}
    worst = flagged(Severity.MOVE_NOW, name="node-zz")
    first = replace(serving(), pods=(), nodes={**many, "node-zz": worst, "node-a": node()}, hosting={})
    body = decided(first).create_pod
    assert body is not None
    [preferred] = body["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    values = preferred["preference"]["matchExpressions"][0]["values"]
    assert (len(values), values[0]) == (64, "node-zz")
