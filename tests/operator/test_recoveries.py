"""The record of interruptions, the events that tell of it, and when a status is worth a write."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api.training_session import Budget
from everloop_operator.api.training_session_status import (
    BudgetStatus,
    ModelStatus,
    Recovery,
    StorageStatus,
    TrainingSessionStatus,
)
from everloop_operator.core import recoveries, status
from everloop_operator.core.observed import Trainer
from everloop_operator.core.report import TrainerReport
from tests.operator.builders import NOW, after, ago, decided, lost, node, pod, report, serving, status_of, text


def reported(id: str, reason: str, seconds_ago: float = 3.0, **changes: Any) -> dict[str, Any]:
    return {
        "id": id,
        "reason": reason,
        "resumedFrom": "m-1:24",
        "replayedOperations": 7,
        "lostOperations": 0,
        "seconds": "1.8",
        "time": text(ago(seconds_ago)),
        **changes,
    }


def merge(entries: list[Recovery], answer: TrainerReport, *, serves: bool = True) -> recoveries.Merged:
    return recoveries.merge(entries, attempt=2, node="node-b", report=answer, serving=serves, now=NOW)


OPEN = Recovery(id="a2", attempt=2, reason="NodeLost", node="node-a", time=text(ago(12.3)))


def test_whole_recovery_from_a_lost_node() -> None:
    """Opened at detection, completed by the trainer's figures when it serves: once, with the times between the two."""
    before = serving()
    first = decided(replace(before, nodes={"node-a": lost(), "node-b": node("node-b")}))
    nodes = {"node-a": lost(), "node-b": node("node-b")}
    moved = after(before, first, now=NOW + timedelta(seconds=12.3), nodes=nodes, pods=(pod(2, node="node-b"),))
    replaying = decided(replace(moved, trainer=Trainer(report=report(2, "Recovering"))))
    assert status_of(replaying).recoveries[-1].seconds is None
    answer = report(2, recoveries=[reported("a2-b1-e1", "PodReplaced")])
    moved = after(moved, replaying, trainer=Trainer(report=answer))
    second = decided(moved)
    [entry] = status_of(second).recoveries
    assert (entry.reason, entry.node, entry.seconds) == ("NodeLost", "node-a", "12.3")
    assert (entry.resumed_from, entry.replayed_operations, entry.lost_operations) == ("m-1:24", 7, 0)
    assert status_of(second).recovery_count == 1
    [event] = [event for event in second.events if event.reason == "Recovered"]
    assert event.message == (
        "attempt 2 serves on node-b 12.3 s after the loss was detected: "
        "resumed from m-1:24, replayed 7 operations, lost 0"
    )
    third = decided(after(moved, second))
    assert third.events == ()
    assert status_of(third) == status_of(second)


def test_events_tell_the_story_in_order() -> None:
    """What `kubectl describe` shows of a lost node: what was lost, what was done, where the next pod may not run."""
    result = decided(serving(nodes={"node-a": lost()}))
    assert [(event.type, event.reason) for event in result.events] == [
        ("Warning", "NodeLost"),
        ("Normal", "NewAttempt"),
        ("Normal", "PodCreated"),
    ]
    assert result.events[0].message == "node node-a is not Ready (NodeStatusUnknown)"
    assert result.events[1].message == "attempt 2 replaces attempt 1 (NodeLost)"
    assert [event.order for event in result.events] == [(2, 0), (2, 1), (2, 2)]
    assert result.events[2].message == "created pod tuned-a2-0, not on node-a"


def test_serving_after_all_is_told() -> None:
    """The story of a session that was Failed, and serves after all, does not end with the warning."""
    before = serving()
    failed = before.session.status.model_copy(update={"phase": "Failed"})
    result = decided(replace(before, session=replace(before.session, status=failed)))
    assert [event.reason for event in result.events] == ["Serving"]


def test_entry_waits_for_serving() -> None:
    """Figures are taken when every model is back, not before."""
    answer = report(2, "Recovering", recoveries=[reported("a2-b1-e1", "PodReplaced")])
    assert merge([OPEN], answer, serves=False).entries == (OPEN,)


def test_attempt_without_models_has_no_figures() -> None:
    """Nothing to recover: only the time is known."""
    [entry] = merge([OPEN], report(2)).entries
    assert (entry.seconds, entry.replayed_operations) == ("12.3", None)


def test_server_restarted_while_it_took_over() -> None:
    """The whole replay is then in the entry of the restart: the attempt's own entry has the same figures."""
    merged = merge([OPEN], report(2, recoveries=[reported("a2-b2-e1", "ServerRestarted")]))
    assert [(item.id, item.replayed_operations) for item in merged.entries] == [("a2", 7), ("a2-b2-e1", 7)]


@pytest.mark.parametrize("reason", ["EngineLost", "ServerRestarted"])
def test_recoveries_in_place_are_merged_by_id(reason: str) -> None:
    """New ones are added with node and attempt; the same id is never added twice."""
    answer = report(2, recoveries=[reported("a2-b1-e2", reason)])
    merged = merge([], answer)
    [entry] = merged.added
    assert (entry.id, entry.reason, entry.attempt, entry.node, entry.seconds) == (
        "a2-b1-e2",
        reason,
        2,
        "node-b",
        "1.8",
    )
    again = merge(list(merged.entries), answer)
    assert (again.added, again.entries) == ((), merged.entries)


def test_list_is_bounded_and_forgets_for_good() -> None:
    """Ten entries, the newest; what has left the list is not added again although the trainer goes on reporting it."""
    answer = report(2, recoveries=[reported(f"a2-b1-e{n}", "EngineLost", 100 - n) for n in range(14)])
    merged = merge([], answer)
    assert [entry.id for entry in merged.entries] == [f"a2-b1-e{n}" for n in range(4, 14)]
    again = merge(list(merged.entries), answer)
    assert (again.added, again.entries) == ((), merged.entries)


def test_budget_forgets_what_left_the_window() -> None:
    """A moving window: used counts only failures within it."""
    limits = Budget(max_attempts=2, window_seconds=100)
    before = BudgetStatus(used=3, limit=9, failures=[text(ago(101)), text(ago(99)), text(ago(1))])
    now = recoveries.budget(limits, before, NOW)
    assert (now.used, now.limit) == (2, 2)
    assert recoveries.refills_at(limits, now) == ago(-1)
    assert recoveries.with_failure(now, NOW).used == 3
    assert recoveries.refills_at(Budget(max_attempts=0), now) is None


# --- status ---------------------------------------------------------------------------------------------------------


def model(id: str, step: int, **changes: Any) -> dict[str, Any]:
    return {"id": id, "modelId": f"s:train:{id}", "rank": 8, "step": step, "seq": step, "pending": 0, **changes}


def checkpoint(name: str, step: int, seconds_ago: float) -> dict[str, Any]:
    time = text(ago(seconds_ago))
    return {"latestCheckpoint": {"name": name, "step": step, "time": time, "path": f"tinker://x/{name}", "bytes": 9}}


def test_models_and_newest_checkpoint() -> None:
    """At most 20 models, most trained first, so that the Step column shows the first; the newest checkpoint of all."""
    models = [model(f"m-{n:02}", n) for n in range(30)]
    models[3] |= checkpoint("new", 2, 5)
    models[29] |= checkpoint("old", 29, 50)
    result = status_of(decided(serving(trainer=Trainer(report=report(models=models)))))
    assert (result.model_count, len(result.models)) == (30, 20)
    assert [item.step for item in result.models[:2]] == [29, 28]
    assert result.latest_checkpoint is not None
    assert (result.latest_checkpoint.model, result.latest_checkpoint.name) == ("m-03", "new")


def test_models_stay_while_the_session_recovers() -> None:
    """A person sees what was trained also while it is being restored."""
    known = serving(trainer=Trainer(report=report(models=[model("m-1", 7)])))
    first = decided(known)
    second = decided(after(known, first, nodes={"node-a": lost()}))
    assert [item.step for item in status_of(second).models] == [7]
    starting = after(known, second, pods=(pod(2),), trainer=Trainer(report=report(2, "Recovering", models=[])))
    assert [item.step for item in status_of(decided(starting)).models] == [7]


@pytest.mark.parametrize(
    ("change", "urgent"),
    [
        ({"models": [ModelStatus(id="m-1", step=3)]}, False),
        ({"model_count": 3}, True),
        ({"phase": "Recovering"}, True),
        ({"attempt": 2}, True),
        ({"pod": None}, True),
        ({"observed_generation": 2}, True),
        ({"recoveries": [OPEN]}, True),
        ({"conditions": []}, True),
        ({"storage": StorageStatus(claim_uid="uid-training", lineage="new")}, True),
        ({"storage": StorageStatus(claim_uid="uid-training", last_snapshot_time="2026-05-01T12:00:00Z")}, False),
    ],
)
def test_what_is_written_at_once(change: dict[str, Any], urgent: bool) -> None:
    """Progress may wait for 15 seconds; what somebody waits for may not."""
    before = serving().session.status
    assert status.urgent(before, before.model_copy(update=change)) is urgent


def test_change_of_words_alone_is_not_urgent() -> None:
    """A message that changes with every poll must not cause a write for each."""
    before = serving().session.status
    other = [item.model_copy(update={"message": "other"}) for item in before.conditions]
    assert not status.urgent(before, before.model_copy(update={"conditions": other}))


def test_replay_mismatch_is_loud() -> None:
    """A replay that computed something else shows in the status, and as a warning, once."""
    observation = serving(trainer=Trainer(report=report(replayMismatches=2)))
    result = decided(observation)
    storage = status_of(result).storage
    assert storage is not None
    assert storage.replay_mismatches == 2
    assert [event.reason for event in result.events] == ["ReplayMismatch"]
    assert decided(after(observation, result)).events == ()


def test_status_survives_a_round_trip() -> None:
    """What is dumped is what is read back: else every pass would write."""
    full = status_of(decided(serving(trainer=Trainer(report=report(models=[model("m", 1, **checkpoint("c", 1, 1))])))))
    assert TrainingSessionStatus.model_validate(status.dump(full), extra="forbid") == full
