"""Suspension, stop and change of a session: when its pod goes, when another is made, and what a person is told."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.core import children
from everloop_operator.core.observed import Observed, Refusal, Trainer
from tests.operator.builders import (
    NOW,
    after,
    ago,
    condition,
    decided,
    lost,
    node,
    observed,
    pod,
    report,
    serving,
    session,
    spec,
    status_of,
)


def written(name: str, pending: int = 0, attempt: int = 1) -> Trainer:
    """The trainer's answer to a request for snapshots."""
    return Trainer(report=report(attempt, snapshotRequest={"id": name, "pending": pending}))


def changed(observation: Observed, generation: int = 2, **changes: Any) -> Observed:
    """Somebody has changed the spec."""
    before = observation.session
    return replace(observation, session=replace(before, spec=spec(**changes), generation=generation))


KINDS = [("Suspended", {"suspend": True}, "suspend-2"), ("Stopped", {"stop": True}, "stop")]


@pytest.mark.parametrize(("state", "change", "request_"), KINDS, ids=[row[0] for row in KINDS])
def test_a_serving_pod_goes_once_its_snapshots_are_written(state: str, change: dict[str, Any], request_: str) -> None:
    """Snapshots while it serves on, then deletion, then the phase: never a step before the one before it."""
    asked = changed(serving(), **change)
    first = decided(asked)
    assert (first.delete_pods, first.create_pod, status_of(first).phase) == ((), None, "Running")
    assert first.poll is not None
    assert (first.poll.snapshot, first.poll.every_seconds) == (request_, 1.0)
    assert first.requeue_after == pytest.approx(30)
    waiting = after(asked, first, trainer=written(request_, pending=1), now=NOW + timedelta(seconds=3))
    assert decided(waiting).delete_pods == ()
    assert decided(waiting).requeue_after == pytest.approx(27)

    done = after(asked, first, trainer=written(request_), now=NOW + timedelta(seconds=3))
    second = decided(done)
    assert [(item.name, item.force) for item in second.delete_pods] == [("tuned-a1-0", False)]
    assert (second.token_attempt, second.poll, status_of(second).pod) == (None, None, None)
    assert status_of(second).phase == "Stopping"
    assert conditions(second) == ("False", "True", "False", "False")
    assert [event.reason for event in second.events] == ["Stopping"]

    gone = after(done, second, pods=(), trainer=Trainer())
    third = decided(gone)
    assert (third.create_pod, third.delete_pods, status_of(third).phase) == (None, (), state)
    assert conditions(third) == ("True", "False", "False", "False")
    assert [event.reason for event in third.events] == [state]
    assert third.requeue_after is None
    assert 1 in third.stale_tokens
    fourth = decided(after(gone, third))
    assert (status_of(fourth), fourth.events) == (status_of(third), ())


def conditions(result: Any) -> tuple[str, ...]:
    return tuple(condition(result, kind)[0] for kind in ("Ready", "Reconciling", "Stalled", "Serving"))


def suspended(**changes: Any) -> Observed:
    """A session whose pods have gone for a suspension."""
    asked = changed(serving(trainer=written("suspend-2")), suspend=True)
    gone = after(asked, decided(asked), pods=(), trainer=Trainer())
    return replace(after(gone, decided(gone)), **changes)


LEAVING: list[tuple[str, dict[str, Any], bool]] = [
    ("serves, nothing written", {}, False),
    ("another request is answered", {"trainer": written("spec-1")}, False),
    ("operator has just started", {"trainer": Trainer()}, False),
    ("starts", {"trainer": Trainer(report=report(1, "Starting"))}, True),
    ("silent", {"trainer": Trainer(report=report(), unreachable_since=ago(10), problem="x")}, True),
    ("is deleted", {"pods": (pod(deletion_requested=ago(1)),)}, True),
    ("has ended", {"pods": (pod(phase="Failed"),)}, True),
    ("node is lost, pod gone", {"pods": (), "nodes": {"node-a": lost()}}, True),
]


@pytest.mark.parametrize(("change", "goes"), [row[1:] for row in LEAVING], ids=[row[0] for row in LEAVING])
def test_what_is_waited_for(change: dict[str, Any], goes: bool) -> None:
    """Only a pod that serves can write snapshots, and only its own answer to this request counts."""
    result = decided(changed(serving(**change), suspend=True))
    assert (status_of(result).rest is not None) is goes
    assert result.create_pod is None
    recoveries = status_of(result).recoveries
    assert recoveries == []


def test_snapshots_are_not_waited_for_longer_than_the_spec_says() -> None:
    """At recovery.checkpointDeadlineSeconds after the first request the pod goes, whatever the storage does."""
    asked = changed(serving(), suspend=True)
    first = decided(asked)
    late = after(asked, first, now=NOW + timedelta(seconds=30), trainer=written("suspend-2", pending=1))
    assert len(decided(late).delete_pods) == 1


def test_resuming_makes_a_pod_without_counting_a_loss() -> None:
    """The next attempt is no recovery: no entry, no budget, and the session starts, it does not recover."""
    result = decided(changed(suspended(), 3))
    assert result.create_pod is not None
    status = status_of(result)
    assert (status.attempt, status.phase, status.rest, status.recovery_count) == (2, "Pending", None, 0)
    assert status.budgets is not None
    assert status.budgets.infrastructure.used == 0
    assert [event.reason for event in result.events] == ["Resumed", "PodCreated"]


def test_resuming_before_the_pod_has_gone() -> None:
    """It is not waited for: the journal keeps it from writing."""
    asked = changed(serving(trainer=written("suspend-2")), suspend=True)
    going = after(asked, decided(asked), pods=(pod(deletion_requested=ago(1)),), trainer=Trainer())
    result = decided(changed(going, 3))
    assert result.create_pod is not None
    assert result.create_pod["metadata"]["name"] == "tuned-a2-0"
    assert status_of(result).recovery_count == 0


def test_resuming_survives_refusal_and_a_lost_status_write() -> None:
    """Neither a quota nor a pass that ended behind the creation makes a loss of it."""
    back = changed(suspended(), 3)
    refused = decided(replace(back, refusal=Refusal("exceeded quota", ago(1), generation=3)))
    assert (refused.create_pod, status_of(refused).phase) == (None, "Failed")
    again = decided(after(back, refused, now=NOW + timedelta(seconds=40)))
    assert again.create_pod is not None
    assert status_of(again).recovery_count == 0
    ahead = decided(replace(back, pods=(pod(2),), trainer=Trainer(report=report(2))))
    assert (status_of(ahead).attempt, status_of(ahead).recovery_count, status_of(ahead).phase) == (2, 0, "Running")


def test_suspended_from_the_start() -> None:
    """No pod is made, and no token."""
    result = decided(observed(session=session(suspend=True)))
    assert (result.create_pod, result.token_attempt, status_of(result).phase) == (None, None, "Suspended")
    assert status_of(result).attempt == 0
    resumed = decided(after(changed(observed()), result))
    assert (status_of(resumed).attempt, status_of(resumed).rest) == (1, None)


def test_pods_of_lost_nodes_do_not_hold_up_a_rest_for_ever() -> None:
    """Without a kubelet that confirms it, the object is removed as that of any replaced pod."""
    asked = changed(serving(trainer=written("suspend-2")), suspend=True)
    stuck = after(
        asked, decided(asked), pods=(pod(deletion_requested=ago(1)),), nodes={"node-a": lost()}, trainer=Trainer()
    )
    assert decided(stuck).requeue_after == pytest.approx(119)
    forced = decided(replace(stuck, now=NOW + timedelta(seconds=119)))
    assert [item.force for item in forced.delete_pods] == [True]
    assert status_of(forced).phase == "Stopping"


def test_stop_ends_a_suspension_for_good() -> None:
    """A suspended session that is stopped is Stopped, and nothing is made for it."""
    result = decided(changed(suspended(), 3, suspend=True, stop=True))
    rest = status_of(result).rest
    assert rest is not None
    assert (status_of(result).phase, rest.state) == ("Stopped", "Stopped")


# --- changes of the spec --------------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {"image": "trainer:2"}
REQUEST = f"spec-{children.template_hash(spec(**OTHER))}"


def test_another_pod_takes_over_at_a_step_boundary() -> None:
    """A new image: snapshots first, while the old pod serves on; then the next attempt, and the old pod goes."""
    asked = changed(serving(), **OTHER)
    first = decided(asked)
    assert (first.create_pod, first.delete_pods, status_of(first).phase) == (None, (), "Running")
    assert first.poll is not None
    assert first.poll.snapshot == REQUEST
    done = after(asked, first, trainer=written(REQUEST), now=NOW + timedelta(seconds=2))
    second = decided(done)
    assert second.create_pod is not None
    assert second.create_pod["spec"]["containers"][0]["image"] == "trainer:2"
    assert (status_of(second).recoveries[-1].reason, status_of(second).leaving) == ("SpecChanged", None)
    late = after(asked, first, now=NOW + timedelta(seconds=30))
    assert decided(late).create_pod is not None


def test_a_change_that_is_taken_back_is_none() -> None:
    """While snapshots are written nothing has happened yet."""
    asked = changed(serving(), **OTHER)
    back = decided(after(changed(serving(), 3), decided(asked)))
    assert (back.create_pod, status_of(back).leaving, status_of(back).phase) == (None, None, "Running")


def test_a_node_that_is_lost_meanwhile_is_a_loss() -> None:
    """Waiting for snapshots does not hide it."""
    asked = changed(serving(nodes={"node-a": node(), "node-b": node("node-b")}), **OTHER)
    gone = decided(after(asked, decided(asked), nodes={"node-a": lost(), "node-b": node("node-b")}))
    assert gone.create_pod is not None
    assert status_of(gone).recoveries[-1].reason == "NodeLost"


LIVE: list[dict[str, Any]] = [
    {"recovery": {"avoidSeconds": 60, "checkpointDeadlineSeconds": 5}},
    {"deadlines": {"startupSeconds": 60}},
]


@pytest.mark.parametrize("change", LIVE, ids=[next(iter(change)) for change in LIVE])
def test_live_fields_touch_no_pod(change: dict[str, Any]) -> None:
    """They take effect at once, in the pod that runs."""
    result = decided(changed(serving(), **change))
    assert (result.create_pod, result.delete_pods, status_of(result).leaving) == (None, (), None)


def test_hash_of_a_pod_does_not_change_with_the_operator() -> None:
    """A later operator finds the pods of this one as it would make them: what it adds has defaults, which are left out.

    These values were computed when the fields were introduced. One that changes restarts every session at an upgrade.
    """
    assert children.template_hash(spec()) == "5d1541b665bb25b9"
    full = spec(
        image="trainer:2",
        engine={"dtype": "BFloat16", "maxSequenceLength": 4096, "threads": 4},
        workers={"resources": {"requests": {"cpu": "8"}, "limits": {"nvidia.com/gpu": 1}}},
        adapters={"maxModels": 4, "maxRank": 32},
        snapshots={"replayBudgetSeconds": 60},
        checkpoints={"everySeconds": 600, "keepLast": 5},
        suspend=True,
        stop=True,
        recovery={"avoidSeconds": 1},
        deadlines={"startupSeconds": 60},
    )
    assert children.template_hash(full) == "cd1b6a59646f41f0"
