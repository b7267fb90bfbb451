"""Suspension, stop and change of a session: when its pod goes, when another is made, and what a person is told."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.core import children
from everloop_operator.core import observed as observed_module
from everloop_operator.core.observed import Observed, Trainer
from everloop_operator.core.refusals import Refusal
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
    assert second.stale_tokens == (1,)

    gone = after(done, second, pods=(), trainer=Trainer())
    third = decided(gone)
    assert (third.create_pod, third.delete_pods, status_of(third).phase) == (None, (), state)
    assert conditions(third) == ("True", "False", "False", "False")
    assert [event.reason for event in third.events] == [state]
    assert third.requeue_after is None
    assert third.stale_tokens == ()
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


# --- idle -----------------------------------------------------------------------------------------------------------


def unused(seconds: float, after_seconds: int = 3600, **changes: Any) -> Observed:
    """A session that serves, and that nobody has used for so long."""
    trainer = Trainer(report=report(), idle_since=ago(seconds))
    return replace(changed(serving(), idle={"afterSeconds": after_seconds}), trainer=trainer, **changes)


IDLE: list[tuple[str, Observed, bool]] = [
    ("long enough", unused(3600), True),
    ("not yet", unused(3599), False),
    ("never", unused(10**7, 0), False),
    ("in use", replace(unused(1), trainer=Trainer(report=report())), False),
    ("operator has just started", replace(unused(1), trainer=Trainer()), False),
    ("silent", replace(unused(1), trainer=replace(unused(9999).trainer, unreachable_since=ago(1))), False),
]


@pytest.mark.parametrize(("observation", "leaves"), [row[1:] for row in IDLE], ids=[row[0] for row in IDLE])
def test_when_a_session_is_idle(observation: Observed, leaves: bool) -> None:
    """Only what its trainer says now counts, and only after the time in the spec."""
    result = decided(observation)
    assert (status_of(result).leaving is not None) is leaves
    assert (result.create_pod, result.delete_pods) == (None, ())


def test_the_moment_of_idleness_is_looked_at() -> None:
    """Nothing else would wake the pass."""
    assert decided(unused(3500)).requeue_after == pytest.approx(100)


def idle(**changes: Any) -> Observed:
    """A session that has given its pod back."""
    asked = unused(3600)
    first = decided(asked)
    leaving = status_of(first).leaving
    assert leaving is not None
    done = after(asked, first, trainer=replace(written(leaving.request), idle_since=asked.trainer.idle_since))
    gone = after(done, decided(done), pods=(), trainer=Trainer())
    return replace(after(gone, decided(gone)), **changes)


def test_a_call_in_the_last_moment_keeps_the_pod() -> None:
    """While snapshots are written the session may be used again."""
    asked = unused(3600)
    back = decided(after(asked, decided(asked), trainer=Trainer(report=report())))
    assert (status_of(back).leaving, back.delete_pods, status_of(back).phase) == (None, (), "Running")


def test_idle_until_the_annotation_changes() -> None:
    """It rests however long; another value of the annotation, whatever it is, makes the next attempt."""
    rested = idle()
    assert rested.session.status.phase == "Idle"
    later = decided(replace(rested, now=NOW + timedelta(days=30)))
    assert (later.create_pod, status_of(later).phase, later.events) == (None, "Idle", ())
    woken = decided(replace(rested, session=replace(rested.session, wake="2026-05-01T12:30:00Z")))
    assert woken.create_pod is not None
    assert (status_of(woken).attempt, status_of(woken).recovery_count, status_of(woken).rest) == (2, 0, None)
    assert [event.reason for event in woken.events] == ["Resumed", "PodCreated"]


def test_a_wake_of_before_is_none() -> None:
    """The value that the annotation had when the session went idle says nothing."""
    asked = unused(3600)
    asked = replace(asked, session=replace(asked.session, wake="yesterday"), pods=())
    rest = status_of(decided(asked)).rest
    assert rest is not None
    assert (rest.state, rest.wake) == ("Idle", "yesterday")
    assert decided(after(asked, decided(asked))).create_pod is None


def test_calls_never_end_a_suspension() -> None:
    """Idle and then suspended: the annotation counts for nothing until the suspension is over."""
    rested = idle()
    asked = changed(replace(rested, session=replace(rested.session, wake="now")), 3, suspend=True)
    result = decided(asked)
    assert (result.create_pod, status_of(result).phase) == (None, "Suspended")
    again = replace(after(asked, result), session=replace(after(asked, result).session, wake="later"))
    assert decided(again).create_pod is None


@pytest.mark.parametrize("change", [{"idle": {"afterSeconds": 0}}, {"idle": {"afterSeconds": 9, "onCall": "Refuse"}}])
def test_idleness_follows_the_spec(change: dict[str, Any]) -> None:
    """With 0 a session that rests is woken; Refuse leaves the waking to a person, and says how."""
    result = decided(changed(idle(), 3, **change))
    assert (result.create_pod is None) is ("onCall" in change["idle"])
    if result.create_pod is None:
        assert "everloop.dev/wake" in condition(result, "Ready")[2]


def test_seconds_of_the_trainer_become_a_steady_time() -> None:
    """Answers of a session that nobody uses are equal, though each has more seconds; a call shows at once."""
    first = observed_module.answered(Trainer(), report(idleSeconds=100), NOW)
    assert first.idle_since == ago(100)
    second = observed_module.answered(first, report(idleSeconds=102), NOW + timedelta(seconds=3))
    assert second == first
    used = observed_module.answered(second, report(idleSeconds=1), NOW + timedelta(seconds=6))
    assert used.idle_since == NOW + timedelta(seconds=5)
    assert observed_module.answered(used, report(idleSeconds=0), NOW).idle_since is None


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
    {"checkpoints": {"everySeconds": 60}},
    {"recovery": {"avoidSeconds": 60, "checkpointDeadlineSeconds": 5}},
    {"deadlines": {"startupSeconds": 60}},
    {"idle": {"afterSeconds": 60, "onCall": "Refuse"}},
    {"ttlSecondsAfterFinished": 60},
    {"deletion": {"deadlineSeconds": 60}},
]


@pytest.mark.parametrize("change", LIVE, ids=[next(iter(change)) for change in LIVE])
def test_live_fields_touch_no_pod(change: dict[str, Any]) -> None:
    """They take effect at once, in the pod that runs."""
    result = decided(changed(serving(), **change))
    assert (result.create_pod, result.delete_pods, status_of(result).leaving) == (None, (), None)


BUILT: dict[str, Any] = {
    "image": "trainer:2",
    "engine": {"dtype": "BFloat16", "maxSequenceLength": 4096, "threads": 4},
    "workers": {"resources": {"requests": {"cpu": "8"}, "limits": {"nvidia.com/gpu": 1}}},
    "adapters": {"maxModels": 4, "maxRank": 32},
    "snapshots": {"replayBudgetSeconds": 60},
}


def test_hash_of_a_pod_does_not_change_with_the_operator() -> None:
    """A later operator finds the pods of this one as it would make them: what it adds has defaults, which are left out.

    These values were computed when the fields were introduced. One that changes restarts every session at an upgrade.
    """
    assert children.template_hash(spec()) == "5d1541b665bb25b9"
    full = spec(
        **BUILT,
        checkpoints={"everySeconds": 600, "keepLast": 5},
        suspend=True,
        stop=True,
        recovery={"avoidSeconds": 1},
        deadlines={"startupSeconds": 60},
        idle={"afterSeconds": 60, "onCall": "Refuse"},
        ttlSecondsAfterFinished=60,
        deletion={"waitForCopies": True},
    )
    assert children.template_hash(full) == "534367e081da9533"


def test_a_pod_of_an_older_operator_stays_until_checkpoints_change() -> None:
    """Its hash counts them, and its trainer may be one that takes no change over."""
    old = serving(pods=(pod(template_hash="cd1b6a59646f41f0"),))
    as_made = decided(changed(old, **BUILT, checkpoints={"everySeconds": 600, "keepLast": 5}))
    assert status_of(as_made).leaving is None
    assert status_of(decided(changed(old, **BUILT, checkpoints={"everySeconds": 60}))).leaving is not None


def test_a_change_of_checkpoints_is_told_until_it_is_reported() -> None:
    """However often server or operator are killed in between; a trainer that does not report them is told nothing."""

    def told(reported: dict[str, Any] | None) -> dict[str, Any] | None:
        now = changed(serving(), checkpoints={"everySeconds": 60})
        poll = decided(replace(now, trainer=Trainer(report=report(1, checkpoints=reported)))).poll
        assert poll is not None
        return poll.checkpoints.model_dump(by_alias=True) if poll.checkpoints else None

    assert told({"everySeconds": 1800.0, "keepLast": 2}) == {"everySeconds": 60, "keepLast": 2}
    assert told({"everySeconds": 60.0, "keepLast": 5}) == {"everySeconds": 60, "keepLast": 2}
    assert told({"everySeconds": 60.0, "keepLast": 2}) is None
    assert told(None) is None
