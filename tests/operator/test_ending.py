"""The end of a session: what is removed when it has been over for long, deletion that waits, and sessions on hold."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.training_session_status import BaseModelStatus, StorageStatus, TrainingSessionStatus
from everloop_operator.core.observed import Container, Observed, Pod, Trainer
from tests.operator.builders import (
    NOW,
    after,
    ago,
    condition,
    decided,
    lost,
    observed,
    pending,
    pod,
    report,
    serving,
    session,
    status_of,
)

DAY = 86_400
FINALIZER = names.FINALIZER_COPIES


# --- after the end --------------------------------------------------------------------------------------------------


def stopped(**changes: Any) -> Observed:
    """Stopped just now."""
    first = observed(session=replace(session(stop=True), **changes))
    return after(first, decided(first))


@pytest.mark.parametrize("by_gateway", [True, False])
def test_a_stopped_session_goes_only_if_the_gateway_made_it(by_gateway: bool) -> None:
    """After ttlSecondsAfterFinished, and not a moment before; what a person made stays, with its result."""
    over = stopped(made_by_gateway=by_gateway)
    early = decided(replace(over, now=NOW + timedelta(seconds=DAY - 10)))
    assert (early.delete_session, early.requeue_after) == (False, pytest.approx(10) if by_gateway else None)
    late = decided(replace(over, now=NOW + timedelta(seconds=DAY)))
    assert (late.delete_session, status_of(late).phase) == (by_gateway, "Stopped")


@pytest.mark.parametrize(("seconds", "soon"), [(0, 1), (5, 5)])
def test_the_pass_that_ends_a_session_asks_for_the_one_that_removes_it(seconds: int, soon: float) -> None:
    """What the operator writes itself wakes nobody."""
    ending = observed(session=replace(session(stop=True, ttlSecondsAfterFinished=seconds), made_by_gateway=True))
    assert decided(ending).requeue_after == pytest.approx(soon)
    over = after(ending, decided(ending), now=NOW + timedelta(seconds=soon))
    assert decided(over).delete_session


def test_a_session_whose_pod_outlasts_its_time_is_removed_once_that_is_gone() -> None:
    """It is over when it is told to stop, but Stopped only without its pod: by then its time may have passed."""
    told = replace(session(serving().session.status, stop=True, ttlSecondsAfterFinished=0), made_by_gateway=True)
    stopping = serving()
    stopping = replace(stopping, session=replace(told, status=stopping.session.status), trainer=Trainer())
    for _ in range(2):  # its pod is told to go, and takes a minute
        stopping = after(stopping, decided(stopping), now=stopping.now + timedelta(seconds=30))
    assert stopping.session.status.phase == "Stopping"
    gone = replace(stopping, pods=())
    result = decided(gone)
    assert (status_of(result).phase, result.delete_session) == ("Stopped", False)
    assert result.requeue_after == pytest.approx(1)
    assert decided(after(gone, result, now=gone.now + timedelta(seconds=1))).delete_session


def failed(**changes: Any) -> Observed:
    """Failed just now, its pod crashing on."""
    broken = Container(exit_code=65, exit_message="StorageMismatch: other/model", finished=NOW)
    pods = (pod(ready=False, container=broken),)
    first = observed(session=replace(session(), **changes), pods=pods)
    recorded = after(first, decided(first))
    assert recorded.session.status.phase == "Failed"
    return recorded


def later(observation: Observed, seconds: float) -> Observed:
    """So much later, and the pod has just crashed again."""
    now = observation.now + timedelta(seconds=seconds)
    pods = tuple(replace(p, container=replace(p.container, finished=now)) for p in observation.pods)
    return replace(observation, now=now, pods=pods)


def test_the_pods_of_a_failed_session_go_in_the_end() -> None:
    """It stays Failed, with its reason; a change of the spec tries again."""
    broken = failed()
    early = decided(later(broken, DAY - 10))
    assert early.delete_pods == ()
    assert early.requeue_after == pytest.approx(10)
    due = later(broken, DAY)
    late = decided(due)
    assert ([item.name for item in late.delete_pods], late.delete_session) == (["tuned-a1-0"], False)
    gone = replace(after(due, late), pods=())
    rested = decided(gone)
    assert (rested.create_pod, status_of(rested).phase) == (None, "Failed")
    assert condition(rested, "Stalled")[1] == "StorageMismatch"
    assert "other/model" in condition(rested, "Stalled")[2]
    assert decided(replace(after(gone, rested), now=NOW + timedelta(days=9))).create_pod is None
    mended = replace(after(gone, rested), session=replace(after(gone, rested).session, generation=2))
    tried = decided(mended)
    assert tried.create_pod is not None
    assert (status_of(tried).attempt, status_of(tried).rest, status_of(tried).phase) == (2, None, "Pending")


def test_a_failed_session_of_the_gateway_is_deleted() -> None:
    """The next call that needs one makes it anew, on the same storage."""
    broken = failed(made_by_gateway=True)
    assert not decided(later(broken, DAY - 1)).delete_session
    assert decided(later(broken, DAY)).delete_session


def test_what_may_heal_by_itself_is_kept() -> None:
    """A pod that finds no node may find one after all."""
    waiting = replace(pod(), node="", phase="Pending", scheduled=None, unschedulable_since=ago(9 * DAY))
    first = observed(session=session(), pods=(waiting,))
    recorded = after(first, decided(first))
    assert recorded.session.status.phase == "Failed"
    result = decided(replace(recorded, now=NOW + timedelta(days=9)))
    assert (result.delete_pods, status_of(result).rest) == ((), None)


# --- deletion -------------------------------------------------------------------------------------------------------


def copying(pending: int) -> Trainer:
    return Trainer(report=report(copies={"pending": pending}))


def deleted(seconds: float, **changes: Any) -> Observed:
    """A serving session that waits for copies, whose deletion was asked for so long ago."""
    base = serving()
    held = session(base.session.status, deletion={"waitForCopies": True, "deadlineSeconds": 300})
    going = replace(held, deleting=True, deletion_time=ago(seconds), finalizers=("other/one", FINALIZER))
    return replace(base, **{"session": going, "trainer": copying(2), **changes})


@pytest.mark.parametrize("wanted", [True, False])
def test_the_finalizer_is_there_only_where_it_was_asked_for(wanted: bool) -> None:
    """By default there is none; asked for, it is set before anything else is made; taken back, it goes."""
    change: dict[str, Any] = {"deletion": {"waitForCopies": wanted}}
    had = () if wanted else ("other/one", FINALIZER)
    result = decided(observed(session=replace(session(**change), finalizers=had)))
    assert result.finalizers == ((FINALIZER,) if wanted else ("other/one",))
    settled = decided(observed(session=replace(session(**change), finalizers=result.finalizers)))
    assert settled.finalizers is None


GONE = ("other/one",)
WAITING: list[tuple[str, dict[str, Any], tuple[str, ...] | None]] = [
    ("copies are pending", {}, None),
    ("one copy is pending", {"trainer": copying(1)}, None),
    ("all are there", {"trainer": copying(0)}, GONE),
    ("an older trainer makes none", {"trainer": Trainer(report=report())}, GONE),
    ("trainer is silent", {"trainer": replace(copying(0), unreachable_since=ago(60))}, None),
    ("nothing is known yet", {"trainer": Trainer()}, None),
    ("no pod, nothing to wait for", {"trainer": Trainer(), "pods": ()}, GONE),
    ("what has served waits for a node", {"trainer": Trainer(), "pods": (pending(2),)}, None),
]


@pytest.mark.parametrize(("change", "left"), [row[1:] for row in WAITING], ids=[row[0] for row in WAITING])
def test_what_a_deletion_waits_for(change: dict[str, Any], left: tuple[str, ...] | None) -> None:
    """Copies that are known to be missing, or may be; meanwhile the pod is kept, and the condition says why."""
    result = decided(deleted(10, **change))
    assert result.finalizers == left
    assert result.delete_pods == ()
    if left is None:
        assert result.requeue_after == pytest.approx(290)
        assert condition(result, "Reconciling")[:2] == ("True", "DeletionWaits")
        until = datetime.fromisoformat(condition(result, "Reconciling")[2].split("until ")[1].split()[0])
        assert until == NOW + timedelta(seconds=290)


def test_a_deletion_says_what_it_waits_for() -> None:
    """How many copies, as far as the trainer has told."""
    for trainer, told in ((copying(2), "2 copies"), (Trainer(), "copies that its trainer has not told of")):
        message = condition(decided(deleted(10, trainer=trainer)), "Reconciling")[2]
        assert message.startswith(f"the deletion waits for {told}, until ")


def test_a_deletion_need_not_wait_any_more() -> None:
    """The wish for copies may be taken back meanwhile; nothing is said to be missing then."""
    going = deleted(10)
    spec = session(deletion={"waitForCopies": False}).spec
    result = decided(replace(going, session=replace(going.session, spec=spec)))
    assert (result.finalizers, result.events) == (GONE, ())


LOADED = BaseModelStatus(manifest_sha256="ab" * 32)
SEEN = replace(pending(), node="node-a", scheduled=ago(90))
MAYBE: list[tuple[str, TrainingSessionStatus, Pod, bool]] = [
    ("it finds no node", TrainingSessionStatus(attempt=1), pending(), False),
    ("its image can't be pulled", TrainingSessionStatus(attempt=1), SEEN, False),
    (
        "its cache is being filled",
        TrainingSessionStatus(attempt=1),
        replace(SEEN, fetch=Container(running=True)),
        False,
    ),
    ("its storage was not opened", TrainingSessionStatus(attempt=1, storage=StorageStatus(claim_uid="u")), SEEN, False),
    ("it runs", TrainingSessionStatus(attempt=1), replace(SEEN, container=Container(running=True)), True),
    ("it has ended", TrainingSessionStatus(attempt=1), replace(SEEN, container=Container(exit_code=0)), True),
    ("it starts again", TrainingSessionStatus(attempt=1), replace(SEEN, container=Container(restarts=1)), True),
    ("storage was opened", TrainingSessionStatus(attempt=2, storage=StorageStatus(lineage="l")), pending(2), True),
    ("the model was loaded", TrainingSessionStatus(attempt=2, base_model=LOADED), pending(2), True),
]


@pytest.mark.parametrize(("status", "only", "waits"), [row[1:] for row in MAYBE], ids=[row[0] for row in MAYBE])
@pytest.mark.parametrize("trainer", [Trainer(), Trainer(unreachable_since=ago(60))], ids=["unasked", "silent"])
def test_a_deletion_waits_for_what_may_have_begun(
    trainer: Trainer, status: TrainingSessionStatus, only: Pod, waits: bool
) -> None:
    """Not for a session of which no pod has ever run; whose pod has run, or has told of anything, may have copies."""
    going = deleted(10)
    result = decided(replace(going, session=replace(going.session, status=status), pods=(only,), trainer=trainer))
    assert result.finalizers == (None if waits else GONE)
    late = deleted(300)
    told = decided(replace(late, session=replace(late.session, status=status), pods=(only,), trainer=trainer)).events
    assert bool(told) == waits


def test_a_deletion_waits_for_who_has_told_and_is_silent() -> None:
    """Though the status does not have it yet."""
    silent = replace(copying(1), unreachable_since=ago(5))
    going = deleted(10, pods=(SEEN,), trainer=silent)
    first = replace(going.session, status=TrainingSessionStatus(attempt=1))
    assert decided(replace(going, session=first)).finalizers is None


@pytest.mark.parametrize("trainer", [copying(2), Trainer(), replace(copying(1), unreachable_since=ago(999))])
def test_the_deadline_holds_whatever_is_down(trainer: Trainer) -> None:
    """Storage, trainer or node: the object goes."""
    for late in (deleted(300, trainer=trainer), deleted(300, trainer=trainer, nodes={})):
        result = decided(late)
        assert result.finalizers == GONE
        [event] = result.events
        assert (event.type, event.reason) == ("Warning", names.EVENT_COPIES_MISSING)
        assert "spec.deletion.deadlineSeconds (300)" in event.message


def test_a_deletion_that_lacks_no_copy_tells_nothing() -> None:
    """Neither in time nor late, and not once the finalizer is gone."""
    for seconds in (10, 300):
        assert decided(deleted(seconds, trainer=copying(0))).events == ()
    gone = deleted(300)
    assert decided(replace(gone, session=replace(gone.session, finalizers=GONE))).events == ()


def test_a_deletion_that_waits_survives_a_lost_node() -> None:
    """The copies are made by the next pod."""
    assert decided(deleted(10, nodes={"node-a": lost()})).create_pod is not None


def test_unreadable_spec_does_not_hold_a_deletion_up() -> None:
    """Delete always wins."""
    going = deleted(10)
    assert decided(replace(going, session=replace(going.session, spec=None, problem="x"))).finalizers == GONE


# --- on hold --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"nodes": {"node-a": lost()}}, {"pods": ()}, {"trainer": Trainer()}])
def test_nothing_is_done_for_a_session_on_hold(change: dict[str, Any]) -> None:
    """Whatever happens to it: one condition says so, all else stays as it was written."""
    before = serving()
    held = replace(before, session=replace(before.session, paused=True, generation=7), **change)
    result = decided(held)
    assert (result.create_pod, result.delete_pods, result.token_attempt, result.finalizers) == (None, (), None, None)
    assert (result.events, result.stale_tokens, result.requeue_after) == ((), (), None)
    assert condition(result, "Reconciling")[:2] == ("False", "Paused")
    old = {c.type: c for c in before.session.status.conditions}
    new = {c.type: c for c in status_of(result).conditions}
    assert [kind for kind in new if new[kind] != old[kind]] == ["Reconciling"]
    rest = status_of(result).model_copy(update={"conditions": before.session.status.conditions})
    assert rest == before.session.status
    assert status_of(decided(after(held, result))) == status_of(result)
    back = decided(replace(after(held, result), session=replace(before.session, generation=7)))
    assert condition(back, "Reconciling")[1] != "Paused"


def test_a_new_session_on_hold_has_all_conditions() -> None:
    """Nothing is known of it, and that is said."""
    result = decided(observed(session=replace(session(), paused=True)))
    assert result.create_pod is None
    assert {c.type for c in status_of(result).conditions} == set(names.CONDITION_TYPES)
    assert condition(result, "Ready")[:2] == ("Unknown", "Paused")


def test_deletion_does_not_stop_at_a_hold() -> None:
    """The finalizer goes when it is time."""
    going = deleted(300)
    assert decided(replace(going, session=replace(going.session, paused=True))).finalizers == GONE
