"""What the gateway decides: which session, which pod, how long to hold. Tables over plain values."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from everloop_gateway import keys
from everloop_gateway.holding import BeginStream, KeepWaiting, Kind, TellToRepeat, is_definitive, next_step
from everloop_gateway.routing import (
    Binding,
    Claim,
    Gone,
    Incarnation,
    SessionView,
    Settle,
    Stopped,
    Target,
    Wait,
    find_target,
    housed,
    session_view,
)
from everloop_gateway.state import Catalogue, Keys, Sessions, SessionSink
from everloop_operator.api import names
from tests.gateway.views import POD, VIEW

BINDING = Binding("id", "team", "a", "uid-a", "org/small", None, "key", VIEW.claim, VIEW.lineage)


@pytest.mark.parametrize(
    ("session", "missing", "found"),
    [
        (VIEW, 0, Target("uid-a", POD)),
        (replace(VIEW, incarnation=None, phase="Recovering", explanation="node b lost"), 0, Wait),
        (replace(VIEW, uid="uid-new"), 0, Target("uid-new", POD)),
        (replace(VIEW, uid="uid-new", base_model="org/other"), 0, Gone),
        (
            replace(VIEW, uid="uid-new", lineage="", incarnation=None, phase="Recovering", explanation="node b lost"),
            0,
            Wait,
        ),
        (replace(VIEW, uid="uid-new", lineage="lineage-b"), 0, Gone),
        (replace(VIEW, uid="uid-new", lineage="lineage-b", incarnation=None), 0, Gone),
        (replace(VIEW, stopped=True), 0, Stopped),
        (replace(VIEW, stopped=True, incarnation=None), 0, Stopped),
        (replace(VIEW, stopped=True, uid="uid-new", lineage="lineage-b"), 0, Gone),
        (None, 29, Wait),
        (None, 30, Gone),
    ],
)
def test_where_a_bound_call_goes(session: SessionView | None, missing: float, found: Any) -> None:
    """The newest incarnation, a wait with its reason, or an end; a re-created session only with the same base model."""
    result = find_target(BINDING, session, missing)
    assert result == found if isinstance(found, Target) else isinstance(result, found)
    assert not isinstance(result, Stopped) or found is Stopped
    if isinstance(result, Wait) and session is not None:
        assert result.reason == "TrainingSession team/a is Recovering: node b lost"


@pytest.mark.parametrize(
    ("session", "owner"),
    [
        (VIEW, Claim("journal", "uid-claim")),
        (replace(VIEW, claim=Claim("other", "uid-other")), Claim("other", "uid-other")),
        (replace(VIEW, claim=Claim("journal", "uid-other"), lineage="lineage-b"), Claim("journal", "uid-claim")),
        (replace(VIEW, claim=Claim("journal", "uid-other"), lineage=""), Claim("journal", "uid-claim")),
        (replace(VIEW, claim=Claim("journal", "")), Claim("journal", "uid-claim")),
        (None, Claim("journal", "uid-claim")),
    ],
)
def test_a_binding_is_owned_by_the_claim_that_its_storage_is_on(session: SessionView | None, owner: Claim) -> None:
    """A storage may have come back under another claim; an owner that is gone would take the binding along."""
    assert housed(BINDING, session) == replace(BINDING, claim=owner)


@pytest.mark.parametrize(
    ("session", "found"),
    [
        (VIEW, Settle("lineage-a", VIEW.claim)),
        (replace(VIEW, uid="uid-new", lineage="lineage-b"), Settle("lineage-b", VIEW.claim)),
        (replace(VIEW, incarnation=None), Wait("TrainingSession team/a is Running")),
        (
            replace(VIEW, lineage=""),
            Wait("TrainingSession team/a is Running; the lineage of its storage is not known yet"),
        ),
        (replace(VIEW, uid="uid-new", base_model="org/other", lineage=""), Gone),
    ],
)
def test_where_a_call_goes_that_was_bound_before_there_was_a_pod(session: SessionView, found: Any) -> None:
    """Nowhere, until it is recorded which lineage gets it."""
    result = find_target(replace(BINDING, lineage=None), session, 0)
    assert isinstance(result, found) if found is Gone else result == found


def resource(**status: Any) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": "a", "uid": "u", "creationTimestamp": "2030-01-01T00:00:00Z"}
    return {
        "metadata": metadata,
        "spec": {
            "baseModel": {"name": "org/small"},
            "adapters": {"maxModels": 16},
            "storage": {"journal": {"claim": {"claimName": "journal"}}},
        },
        "status": status,
    }


@pytest.mark.parametrize(
    ("status", "incarnation"),
    [
        ({}, None),
        ({"attempt": 1, "pod": {"name": "p"}}, None),
        ({"attempt": 1, "pod": {"name": "p", "uid": "x"}}, None),
        ({"attempt": 1, "pod": {"name": "p", "ip": "10.0.0.1"}}, None),
        ({"pod": {"name": "p", "uid": "x", "ip": "10.0.0.1"}}, None),
        ({"attempt": 2, "pod": {"name": "p", "uid": "x", "ip": "10.0.0.1"}}, Incarnation(2, "x", "10.0.0.1")),
    ],
)
def test_an_incarnation_is_complete_or_none(status: dict[str, Any], incarnation: Incarnation | None) -> None:
    """A pod without an address is no place to send anything."""
    assert session_view(resource(**status)).incarnation == incarnation


def condition(kind: str, status: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "R", "message": message}


def test_the_reason_for_waiting_is_the_most_telling_condition() -> None:
    """Stalled says more than Serving, Serving more than Reconciling; conditions in order say nothing."""
    conditions = [
        condition(names.CONDITION_RECONCILING, "True", "working"),
        condition(names.CONDITION_SERVING, "False", "node lost"),
        condition(names.CONDITION_STALLED, "True", "budget spent"),
    ]
    for expected in ("budget spent", "node lost", "working", ""):
        found = session_view(resource(phase="Recovering", conditions=conditions)).explanation
        assert found == expected
        if conditions:
            conditions.pop()


FIVE = KeepWaiting(5.0)
STREAM = BeginStream()
PAUSED, BUSY, AGAIN = TellToRepeat(402), TellToRepeat(429), TellToRepeat(408)


@pytest.mark.parametrize(
    ("kind", "waited", "outage", "sent", "step"),
    [
        (Kind.CREATE, 0, 0, False, FIVE),
        (Kind.TRAIN, 0, 1e6, False, FIVE),
        (Kind.SAVE, 0, 1e6, False, FIVE),
        (Kind.QUERY, 4, 0, False, KeepWaiting(1.0)),
        (Kind.CREATE, 5, 1e6, False, STREAM),
        (Kind.QUERY, 5, 599, False, STREAM),
        (Kind.QUERY, 30, 600, False, PAUSED),
        (Kind.TRAIN, 5, 599, False, STREAM),
        (Kind.TRAIN, 5, 600, False, KeepWaiting(25.0)),
        (Kind.TRAIN, 30, 600, False, PAUSED),
        (Kind.SAVE, 5, 59, False, STREAM),
        (Kind.SAVE, 5, 60, True, KeepWaiting(25.0)),
        (Kind.SAVE, 30, 85, False, PAUSED),
        (Kind.SAMPLE, 5, 0, False, KeepWaiting(15.0)),
        (Kind.SAMPLE, 20, 0, True, BUSY),
        (Kind.POLL, 5, 0, False, KeepWaiting(25.0)),
        (Kind.POLL, 30, 0, False, AGAIN),
        (Kind.POLL, 30, 0, True, KeepWaiting(10.0)),
        (Kind.POLL, 40, 0, True, AGAIN),
        (Kind.POLL_ALL, 5, 0, False, KeepWaiting(25.0)),
        (Kind.POLL_ALL, 40, 0, True, AGAIN),
    ],
)
def test_how_a_call_is_held(kind: Kind, waited: float, outage: float, sent: bool, step: object) -> None:
    """Each kind is answered in the way on which the SDK comes again without end, and within its read timeout."""
    assert next_step(kind, waited, outage, sent) == step


@pytest.mark.parametrize(
    ("status", "definitive"),
    [(200, True), (400, True), (404, True), (408, True), (410, True), (413, True), (429, True)]
    + [(401, False), (403, False), (421, False), (500, False), (502, False), (503, False), (504, False)],
)
def test_which_answers_of_a_pod_are_the_clients(status: int, definitive: bool) -> None:
    """Trouble between gateway and pod is never the client's."""
    assert is_definitive(status) is definitive


def test_clocks_of_missing_and_failing_sessions() -> None:
    """Missing counts from the first question, an outage from the first failure, and both end."""
    now = 100.0
    sessions = Sessions(lambda: now)
    key = ("team", "a")
    assert sessions.missing_seconds(key) == 0
    now = 107.0
    assert sessions.missing_seconds(key) == 7
    sessions.put(VIEW)
    sessions.drop(key)
    now = 110.0
    assert sessions.missing_seconds(key) == 3
    assert sessions.outage_seconds(key) == 0
    sessions.call_failed(key)
    now = 115.0
    sessions.call_failed(key)
    assert sessions.outage_seconds(key) == 5
    sessions.call_answered(key)
    assert sessions.outage_seconds(key) == 0


def test_a_change_wakes_those_who_wait_for_it_and_nobody_else() -> None:
    """An unchanged object is no change."""
    sessions = Sessions()
    mine, any_session, other = sessions.change(("team", "a")), sessions.change(None), sessions.change(("team", "b"))
    sessions.put(VIEW)
    assert (mine.is_set(), any_session.is_set(), other.is_set()) == (True, True, False)
    again = sessions.change(("team", "a"))
    sessions.put(VIEW)
    assert not again.is_set()
    sessions.put(replace(VIEW, incarnation=None))
    assert again.is_set()


def named(namespace: str, name: str) -> dict[str, Any]:
    found = resource()
    found["metadata"] = {**found["metadata"], "namespace": namespace, "name": name}
    return found


def test_a_list_replaces_what_is_known_of_its_namespace_only() -> None:
    """A session missing from a new list is gone; those that another list brings stay."""
    sessions = Sessions()
    a, b = SessionSink(sessions, "a"), SessionSink(sessions, "b")
    a.replace([named("a", "one"), named("a", "two")])
    b.upsert(named("b", "three"))
    a.replace([named("a", "two")])
    assert sessions.known() == [("a", "two"), ("b", "three")]
    SessionSink(sessions, None).replace([named("c", "four")])
    assert sessions.known() == [("c", "four")]


def test_a_secret_that_breaks_closes_the_door_it_opened() -> None:
    """An edit that spoils a key does not leave its old record in force."""
    _, manifest = keys.mint("team", "ann", "system", None, bytes(38))
    data = {field: base64.b64encode(text.encode()).decode() for field, text in manifest["stringData"].items()}
    known = Keys()
    known.replace([{"metadata": manifest["metadata"], "data": data}])
    assert known.get("000000000000") is not None
    known.upsert({"metadata": manifest["metadata"], "data": {**data, "sha256": ""}})
    assert known.get("000000000000") is None


def test_an_unreadable_catalogue_leaves_the_last_good_one() -> None:
    """A typo in the values does not take the aliases away from running clients."""
    catalogue = Catalogue()
    good = '[{"name": "org/small", "aliases": ["small"], "tokenizer_id": "org/tokenizer"}]'
    for text in (good, "[", '{"name": "x"}'):
        catalogue.upsert({"data": {names.CATALOGUE_FIELD: text}})
        assert catalogue.tokenizer_id("org/small") == "org/tokenizer"
    catalogue.replace([])
    assert catalogue.tokenizer_id("org/small") is None
