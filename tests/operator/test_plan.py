"""plan(observed): when a session gets a pod, when the pod is replaced, and what becomes of the old one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.training_session_status import (
    BudgetsStatus,
    BudgetStatus,
    PodStatus,
    Recovery,
    TrainingSessionStatus,
)
from everloop_operator.core import failure_classes
from everloop_operator.core.observed import Claim, Container, Observed, Pod, Trainer
from everloop_operator.core.refusals import Refusal, refused
from everloop_operator.core.status import dump
from tests.operator.builders import (
    CLAIMS,
    NOW,
    after,
    ago,
    condition,
    decided,
    lost,
    node,
    observed,
    pending,
    pod,
    report,
    serving,
    session,
    status_of,
    text,
)


def test_first_attempt() -> None:
    """A new session gets pod and token of attempt 1, all conditions, and a reason to wait."""
    result = decided(observed())
    assert result.create_pod is not None
    assert result.create_pod["metadata"]["name"] == "tuned-a1-0"
    assert result.token_attempt == 1
    status = status_of(result)
    assert (status.phase, status.attempt, status.pod) == ("Pending", 1, None)
    assert [c.type for c in status.conditions] == list(names.CONDITION_TYPES)
    assert status.recoveries == []
    assert [event.reason for event in result.events] == ["PodCreated"]


@pytest.mark.parametrize(("running", "attempt"), [(True, None), (False, 1)])
def test_token_is_written_until_its_container_runs(running: bool, attempt: int | None) -> None:
    """What a running container has mounted is not written again by every new operator."""
    there = replace(serving(), pods=(pod(container=Container(running=running)),))
    assert decided(there).token_attempt == attempt


def test_session_in_deletion_is_left_alone() -> None:
    """Children go by their owner references; nothing is created or written meanwhile."""
    result = decided(observed(session=replace(session(), deleting=True)))
    assert (result.create_pod, result.status, result.token_attempt, result.poll) == (None, None, None, None)


def test_healthy_session_is_left_alone() -> None:
    """A pod that serves is neither touched nor written about."""
    at_rest = serving()
    result = decided(at_rest)
    assert result.create_pod is None
    assert (result.delete_pods, result.events, result.requeue_after) == ((), (), None)
    assert status_of(result) == at_rest.session.status
    assert result.poll is not None
    assert result.poll.every_seconds == 3.0


FENCED = Container(
    exit_code=64, exit_message="Fenced: attempt 1 of pod x is superseded by incarnation 9: attempt 6 of y"
)

BUSY = Trainer(report=report(1, "Recovering"))
LOSSES: list[tuple[str, dict[str, Any], str, bool]] = [
    ("node unknown", {"nodes": {"node-a": lost()}}, "NodeLost", True),
    ("node gone", {"nodes": {}}, "NodeGone", True),
    ("node replaced", {"nodes": {"node-a": node(uid="another")}}, "NodeGone", True),
    ("out of service", {"nodes": {"node-a": node(out_of_service=True)}}, "NodeLost", True),
    ("pod gone", {"pods": ()}, "PodLost", True),
    ("pod gone with its node", {"pods": (), "nodes": {}}, "NodeGone", True),
    ("pod gone from a sick node", {"pods": (), "nodes": {"node-a": lost(seconds=0.1)}}, "NodeLost", True),
    (
        "pod deleted from a sick node",
        {"pods": (pod(deletion_requested=ago(1)),), "nodes": {"node-a": lost(seconds=0.1)}},
        "NodeLost",
        True,
    ),
    ("pod evicted", {"pods": (pod(phase="Failed", failure="Evicted: disk"),)}, "Evicted", True),
    ("pod succeeded", {"pods": (pod(phase="Succeeded"),)}, "PodFailed", True),
    ("pod deleted", {"pods": (pod(deletion_requested=ago(1)),)}, "PodDeleted", False),
    ("pod preempted", {"pods": (pod(disruption="PreemptionByScheduler"),)}, "Preempted", False),
    ("pod fenced", {"pods": (pod(container=FENCED),)}, "Fenced", True),
    ("spec changed", {"pods": (pod(template_hash="other"),), "trainer": BUSY}, "SpecChanged", False),
]


@pytest.mark.parametrize(("change", "reason", "counted"), [row[1:] for row in LOSSES], ids=[row[0] for row in LOSSES])
def test_loss_starts_the_next_attempt_at_once(change: dict[str, Any], reason: str, counted: bool) -> None:
    """Each kind of loss makes the next pod in the same pass, with its entry, budget and event."""
    result = decided(serving(**change))
    assert result.create_pod is not None
    status = status_of(result)
    assert status.attempt > 1
    assert result.create_pod["metadata"]["name"] == f"tuned-a{status.attempt}-0"
    assert (status.phase, status.pod) == ("Recovering", None)
    entry = status.recoveries[-1]
    assert (entry.reason, entry.node, entry.seconds, entry.id) == (reason, "node-a", None, f"a{status.attempt}")
    assert status.recovery_count == 1
    assert status.budgets is not None
    assert status.budgets.infrastructure.used == int(counted)
    told = [event.reason for event in result.events]
    assert "NewAttempt" in told
    assert (reason in told) == (reason in failure_classes.CLASSES)
    assert condition(result, "Serving")[:2] == ("False", "Recovering")


def test_node_may_be_not_ready_for_a_moment() -> None:
    """Below the limit nothing happens, and the next look is due exactly when the limit is reached."""
    result = decided(serving(nodes={"node-a": lost(seconds=0.5)}))
    assert result.create_pod is None
    assert result.requeue_after == pytest.approx(1.5)
    assert condition(result, "NodesHealthy")[:2] == ("False", "NodeNotReady")
    assert condition(result, "Serving")[0] == "True"


def test_answer_of_a_zombie_does_not_count() -> None:
    """The node decides: a pod that still reports Serving is replaced."""
    result = decided(serving(nodes={"node-a": lost()}, trainer=Trainer(report=report())))
    assert result.create_pod is not None
    assert result.poll is None


def test_next_pod_avoids_the_lost_node() -> None:
    """Required anti-affinity by host name: to the node that is lost now, and those lost within avoidSeconds."""
    before = serving(2, TrainingSessionStatus(attempt=2, recoveries=[entry("a2", "NodeLost", "node-b", 600)]))
    result = decided(replace(before, nodes={"node-a": lost(), "node-b": node("node-b", hostname="host-b")}))
    assert avoided(result.create_pod) == ["host-b", "node-a"]
    old = serving(2, TrainingSessionStatus(attempt=2, recoveries=[entry("a2", "NodeLost", "node-b", 90_000)]))
    result = decided(replace(old, nodes={"node-a": lost(), "node-b": node("node-b")}))
    assert avoided(result.create_pod) == ["node-a"]


def test_deleted_pod_may_return_to_its_node() -> None:
    """Only a lost node is avoided."""
    result = decided(serving(pods=(pod(deletion_requested=ago(1)),)))
    assert avoided(result.create_pod) == []


def test_avoidance_ends_when_no_other_node_has_room() -> None:
    """A pod that finds no room is replaced by one that may use the failed node, once that is Ready again."""
    status = TrainingSessionStatus(attempt=2, recoveries=[entry("a2", "NodeLost", "node-a", 60)])
    waiting = pending(2, unschedulable_since=ago(6), avoided_nodes=frozenset({"node-a"}))
    base = observed(session=session(status), pods=(waiting,))
    assert decided(replace(base, nodes={"node-a": lost()})).create_pod is None
    early = replace(base, pods=(replace(waiting, unschedulable_since=ago(1)),))
    assert decided(early).create_pod is None
    result = decided(base)
    assert avoided(result.create_pod) == []
    assert status_of(result).recoveries[-1].reason == "AvoidanceLifted"
    budgets = status_of(result).budgets
    assert budgets is not None
    assert budgets.infrastructure.used == 0


def test_attempt_is_greater_than_any_known() -> None:
    """1 + the greatest of status, labels, the epoch that the trainer reports, and names that are still taken."""
    fenced = decided(serving(pods=(pod(container=FENCED),)))
    assert status_of(fenced).attempt == 7
    reported = decided(serving(pods=(pod(deletion_requested=ago(1)),), trainer=Trainer(report=report(5))))
    assert status_of(reported).attempt == 6
    taken = decided(observed(taken_attempts=frozenset({1, 3})))
    assert status_of(taken).attempt == 4
    labels = decided(observed(session=session(TrainingSessionStatus(attempt=1)), pods=(pod(3, phase="Failed"),)))
    assert status_of(labels).attempt == 4


def test_pod_ahead_of_the_status_is_adopted() -> None:
    """The pass that made it failed to write: the story is told now, and no further pod is made."""
    ahead = serving(nodes={"node-a": lost(), "node-b": node("node-b")}, pods=(pod(), pending(2)))
    result = decided(ahead)
    assert result.create_pod is None
    status = status_of(result)
    assert (status.attempt, status.recoveries[-1].reason, status.recovery_count) == (2, "NodeLost", 1)
    assert status.budgets is not None
    assert status.budgets.infrastructure.used == 1
    assert [deletion.name for deletion in result.delete_pods] == ["tuned-a1-0"]


def test_story_survives_a_restart_between_pod_and_status() -> None:
    """A restarted operator has seen the node not Ready for a moment only; that its pod is replaced says the rest."""
    started = {"node-a": lost(seconds=0.0), "node-b": node("node-b")}
    result = decided(serving(nodes=started, pods=(pod(), pending(2))))
    entry = status_of(result).recoveries[-1]
    assert (entry.id, entry.reason, entry.node) == ("a2", "NodeLost", "node-a")
    assert [event.reason for event in result.events] == ["NodeLost", "NewAttempt"]
    back = decided(serving(pods=(pod(), pending(2))))
    assert [(entry.id, entry.reason) for entry in status_of(back).recoveries] == [("a2", "PodDeleted")]


def test_node_that_turns_pods_away_does_not_use_up_the_budget() -> None:
    """The first failed pod is replaced at once, later ones after a growing delay; one of long ago does not count."""
    rejected = pod(3, phase="Failed", failure="UnexpectedAdmissionError: no devices")

    def after_failures(*seconds: float) -> Observed:
        failures = [text(ago(value)) for value in seconds]
        budget = BudgetsStatus(infrastructure=BudgetStatus(used=len(failures), limit=20, failures=failures))
        return serving(3, TrainingSessionStatus(attempt=3, budgets=budget), pods=(rejected,))

    assert decided(after_failures()).create_pod is not None
    waiting = decided(after_failures(3, 2, 1))
    assert (waiting.create_pod, status_of(waiting).phase, status_of(waiting).attempt) == (None, "Recovering", 3)
    assert "UnexpectedAdmissionError" in condition(waiting, "Serving")[2]
    assert waiting.requeue_after == pytest.approx(7)
    assert decided(after_failures(10, 9, 8)).create_pod is not None
    assert decided(after_failures(*[1] * 19)).requeue_after == pytest.approx(59)
    assert decided(after_failures(700, 650)).create_pod is not None
    assert decided(replace(after_failures(3, 2, 1), nodes={"node-a": lost()})).create_pod is not None


def test_clock_that_is_set_back_delays_nothing() -> None:
    """What began in the future began long ago."""
    ahead = decided(serving(nodes={"node-a": lost(seconds=-3600)}))
    assert status_of(ahead).recoveries[-1].reason == "NodeLost"
    assert decided(observed(refusal=Refusal("exceeded quota", ago(-3600), generation=1))).create_pod is not None


def test_exhausted_budget_is_failed_until_it_refills() -> None:
    """No pod, the last cause in words, and the next look when the oldest failure leaves the window."""
    failures = [text(ago(80_000)), text(ago(10))]
    status = TrainingSessionStatus(
        attempt=3, budgets=BudgetsStatus(infrastructure=BudgetStatus(used=2, limit=2, failures=failures))
    )
    changed = {"recovery": {"infrastructure": {"maxAttempts": 2}}}
    before = serving(3, status)
    gone = replace(before, session=session(before.session.status, **changed), nodes={"node-a": lost()})
    result = decided(gone)
    assert result.create_pod is None
    assert status_of(result).phase == "Failed"
    assert condition(result, "Stalled")[:2] == ("True", "BudgetExhausted")
    assert "node node-a is not Ready" in condition(result, "Stalled")[2]
    assert status_of(result).recoveries == []
    assert result.requeue_after == pytest.approx(6400)
    assert decided(replace(gone, now=NOW + timedelta(seconds=6400))).create_pod is not None
    back = decided(replace(after(gone, result), nodes={"node-a": node()}))
    assert (back.create_pod, status_of(back).phase) == (None, "Running")


def test_budget_is_counted_at_the_object() -> None:
    """With a limit of two, three attempts and no fourth, after pauses that grow; all that is known is the status."""
    limits = {"recovery": {"infrastructure": {"maxAttempts": 2, "windowSeconds": 86_400}}}
    status, now, pauses = TrainingSessionStatus(), NOW, []
    made: list[str] = []
    while status.phase != "Failed":
        attempt = status.attempt
        broken = (pod(attempt, phase="Failed", failure="PodFailed: exit code 137", ready=False),) if attempt else ()
        seen = observed(session=session(status, **limits), now=now, pods=broken)
        result = decided(seen)
        status = TrainingSessionStatus.model_validate(dump(status_of(result)))  # as a restarted operator reads it
        if result.create_pod:
            made.append(result.create_pod["metadata"]["name"])
            pauses.append((now - NOW).total_seconds())
        else:
            assert result.requeue_after is not None
            now += timedelta(seconds=result.requeue_after)
    assert made == ["tuned-a1-0", "tuned-a2-0", "tuned-a3-0"]
    assert pauses == pytest.approx([0, 0, 2])
    assert condition(result, "Stalled")[1] == "BudgetExhausted"
    assert "exit code 137" in condition(result, "Stalled")[2]


def test_refused_pod_is_not_tried_again_at_once() -> None:
    """The API server's words stall the session; the attempt does not count; later, or for a new spec, it is tried."""
    refusal = Refusal("limits: Invalid value", ago(5), generation=1)
    result = decided(observed(refusal=refusal))
    assert (result.create_pod, status_of(result).attempt, status_of(result).phase) == (None, 0, "Failed")
    assert condition(result, "Stalled")[1] == "PodInvalid"
    assert result.requeue_after == pytest.approx(25)
    for other in (replace(refusal, time=ago(31)), replace(refusal, generation=0)):
        tried = decided(observed(refusal=other))
        assert tried.create_pod is not None
        assert status_of(tried).phase == "Pending"


def test_what_is_forbidden_for_a_moment_is_waited_for() -> None:
    """The session is on its way, says what it waits for, and tries again soon: clients wait with it."""
    refusal = refused(None, "service account not found", ago(1), 1, forbidden=True)
    result = decided(observed(refusal=refusal))
    assert (result.create_pod, status_of(result).phase) == (None, "Pending")
    assert condition(result, "Stalled")[0] == "False"
    assert condition(result, "PodsReady")[1:] == ("PodCreating", "service account not found")
    assert result.requeue_after == pytest.approx(4)


def test_refused_replacement_of_a_lost_pod_is_stalled() -> None:
    """A lost pod that can't be replaced does not pass for serving."""
    refusal = Refusal("exceeded quota", ago(5), generation=1)
    result = decided(serving(nodes={"node-a": lost()}, refusal=refusal))
    assert (result.create_pod, status_of(result).attempt, status_of(result).phase) == (None, 1, "Failed")
    assert condition(result, "Serving")[0] == "False"


def test_unreadable_spec_is_a_condition() -> None:
    """A spec that this version can't read stalls the session and touches nothing that runs."""
    broken = replace(session(TrainingSessionStatus(attempt=1)), spec=None, problem="spec.engine: broken")
    result = decided(observed(session=broken, pods=(pod(),)))
    assert (result.create_pod, result.delete_pods) == (None, ())
    assert condition(result, "Stalled") == ("True", "InvalidSpec", "spec.engine: broken")


# --- old pods -------------------------------------------------------------------------------------------------------


def replaced(old: Pod, **changes: Any) -> Observed:
    """Attempt 2 serves on node-b, and this pod of attempt 1 is left."""
    nodes = {"node-a": lost(), "node-b": node("node-b")}
    base = serving(2, pods=(pod(2),))
    return replace(base, **{"pods": (old, pod(2, node="node-b")), "nodes": nodes, **changes})


def test_old_pod_is_deleted_ordinarily_first() -> None:
    """The kubelet may still confirm it."""
    [deletion] = decided(replaced(pod(1))).delete_pods
    assert (deletion.name, deletion.uid, deletion.force) == ("tuned-a1-0", "uid-pod-1", False)


PROOFS: list[tuple[str, Pod, dict[str, Any], bool]] = [
    ("no proof", pod(1, deletion_requested=ago(100)), {}, False),
    ("deadline", pod(1, deletion_requested=ago(121)), {}, True),
    ("node gone", pod(1, deletion_requested=ago(1)), {"nodes": {"node-b": node("node-b")}}, True),
    (
        "out of service",
        pod(1, deletion_requested=ago(1)),
        {"nodes": {"node-a": node(ready=False, out_of_service=True), "node-b": node("node-b")}},
        True,
    ),
    ("failed", pod(1, deletion_requested=ago(1), phase="Failed"), {}, True),
    (
        "failed, with a kubelet that will see to it",
        pod(1, deletion_requested=ago(1), phase="Failed"),
        {"nodes": {"node-a": node(), "node-b": node("node-b")}},
        False,
    ),
    (
        "deadline, but exclusive volume",
        pod(1, deletion_requested=ago(9999)),
        {"claims": {**CLAIMS, "training": Claim("training", "uid-training", "Bound", frozenset({"ReadWriteOnce"}))}},
        False,
    ),
    (
        "deadline, but unknown volume",
        pod(1, deletion_requested=ago(9999)),
        {"claims": {"models": CLAIMS["models"], "training": None}},
        False,
    ),
]


@pytest.mark.parametrize(("old", "change", "force"), [row[1:] for row in PROOFS], ids=[row[0] for row in PROOFS])
def test_force_deletion(old: Pod, change: dict[str, Any], force: bool) -> None:
    """Forced only with proof of death, or after the deadline where the journal itself fences the pod off."""
    result = decided(replaced(old, **change))
    assert [deletion.force for deletion in result.delete_pods] == ([True] if force else [])
    assert [event.reason for event in result.events] == (["PodForceDeleted"] if force else [])


def test_deadline_of_an_old_pod_is_waited_for() -> None:
    """The next look is due when it may be forced."""
    assert decided(replaced(pod(1, deletion_requested=ago(100)))).requeue_after == pytest.approx(20)


def test_a_token_goes_with_its_attempt_and_only_then() -> None:
    """Until the status says that the attempt is over; an operator that starts over such a status removes nothing."""
    over = replace(serving(3), nodes={"node-a": lost()})
    lasting = decided(over)
    assert lasting.create_pod is not None
    assert lasting.stale_tokens == (3,)
    ahead = serving(nodes={"node-a": lost(), "node-b": node("node-b")}, pods=(pod(), pending(2)))
    assert decided(ahead).stale_tokens == (1,), "a pass that broke off is made up for"
    assert decided(after(over, lasting, pods=(pod(3), pending(4)))).stale_tokens == ()
    assert decided(serving(3)).stale_tokens == ()
    assert decided(replaced(pod(1, deletion_requested=ago(1)))).stale_tokens == ()


def entry(id: str, reason: str, node_name: str, seconds: float) -> Recovery:
    return Recovery(id=id, attempt=2, reason=reason, node=node_name, time=text(ago(seconds)), seconds="1.0")


def avoided(body: Any) -> list[str]:
    affinity = body["spec"].get("affinity")
    if affinity is None:
        return []
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    expression = terms[0]["matchExpressions"][0]
    assert (expression["key"], expression["operator"]) == ("kubernetes.io/hostname", "NotIn")
    return list(expression["values"])


def test_recorded_pod_survives_in_status() -> None:
    """The status names the pod, its node and the node's UID, by which a replaced node is recognised."""
    status = serving().session.status
    assert status.pod == PodStatus(
        name="tuned-a1-0", uid="uid-pod-1", node="node-a", node_uid="uid-node-a", ip="127.0.0.9"
    )
