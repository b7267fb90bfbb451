"""Where a new model goes, and which TrainingSession is made for it. Tables over plain values."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from everloop_gateway.catalogue import (
    CatalogueEntry,
    InvalidCatalogue,
    SessionTemplate,
    catalogue_entries,
    session_manifest,
    session_name,
)
from everloop_gateway.placement import Create, Unplaceable, place
from everloop_gateway.routing import Claim, Incarnation, SessionView, Wait
from everloop_operator.api import names
from everloop_operator.api.training_session import MAX_NAME_LENGTH
from tests.gateway.views import VIEW as SERVING

VIEW = replace(SERVING, incarnation=None)
CATALOGUE = (CatalogueEntry("org/small", ("small",)), CatalogueEntry("org/absent", ("absent",)))
FIRST, SECOND = session_name("org/small", 1), session_name("org/small", 2)


def view(name: str, **changes: Any) -> SessionView:
    return replace(VIEW, name=name, uid=f"uid-{name}", **changes)


def template(**changes: Any) -> SessionTemplate:
    return replace(SessionTemplate({"claim": {"claimName": "models"}}, {}, {}, (), 1), **changes)


def catalogue(**changes: Any) -> tuple[CatalogueEntry, ...]:
    """One from which sessions may be made for org/small."""
    return (replace(CATALOGUE[0], template=template(**changes)), CATALOGUE[1])


@pytest.mark.parametrize(
    ("sessions", "chosen"),
    [
        ([view("a")], "a"),
        ([view("a", created="2030-01-03"), view("b", created="2030-01-02")], "b"),
        ([view("a", phase="Pending", created="2030-01-01"), view("b", created="2030-01-02")], "b"),
        ([view("a", phase="Pending", created="2030-01-02"), view("b", phase="Starting", created="2030-01-01")], "b"),
        ([view("a", phase="Failed", created="2030-01-01"), view("b", phase="Pending", created="2030-01-02")], "b"),
        ([view("a", created="2030-01-01"), view("b", created="2030-01-02", default=True, phase="Pending")], "b"),
        ([view("a", deleting=True), view("b", created="2031")], "b"),
        ([view("a", base_model="org/other"), view("b")], "b"),
        ([view("a", namespace="other", default=True), view("b")], "b"),
        ([view("b"), view("a")], "a"),
        ([view("a", model_count=16), view("b", created="2031")], "b"),
        ([view("a", model_count=16, default=True), view("b", created="2031")], "b"),
        ([view("a", model_count=16), view("b", created="2031", phase="Recovering")], "b"),
        ([view("a", phase="Stopped", stopped=True), view("b", created="2031", phase="Pending")], "b"),
        ([view("a", phase="Suspended"), view("b", created="2031", phase="Pending")], "b"),
        ([view("a", phase="Suspended")], "a"),
    ],
)
@pytest.mark.parametrize("entries", [CATALOGUE, catalogue()])
def test_the_session_for_a_new_model(
    sessions: list[SessionView], chosen: str, entries: tuple[CatalogueEntry, ...]
) -> None:
    """One with room: default label, else serving, else not failed; the oldest, then by name. None is made then."""
    for asked in ("org/small", "small"):
        found = place(asked, "team", sessions, entries, needs_slot=True)
        assert isinstance(found, SessionView)
        assert found.name == chosen


def test_a_served_name_is_stronger_than_an_alias() -> None:
    """A session may serve a model whose name is another's alias."""
    sessions = [view("a"), view("b", base_model="small")]
    assert place("small", "team", sessions, CATALOGUE, needs_slot=True) == sessions[1]


@pytest.mark.parametrize("default", [True, False])
def test_a_stopped_session_takes_no_model(default: bool) -> None:
    """Whoever asks for its base model is told that it was stopped, or gets another one from the catalogue."""
    stopped = view(FIRST, phase="Stopped", stopped=True, explanation="spec.stop is true", default=default)
    with pytest.raises(Unplaceable, match=f"{FIRST} is Stopped: spec.stop is true"):
        place("org/small", "team", [stopped], CATALOGUE, needs_slot=True)
    if not default:
        assert place("org/small", "team", [stopped], catalogue(limit=2), needs_slot=True) == Create(
            SECOND, "org/small", template(limit=2)
        )


def test_a_key_of_one_session_gets_no_other() -> None:
    """Neither the default nor the oldest, and none is made for it; another base model is refused."""
    others = [view("a", created="2030-01-01"), view("b", default=True), view("mine", created="2031")]
    assert place("small", "team", others, catalogue(), needs_slot=True, only="mine") == others[2]
    for sessions in ([*others[:2], view("mine", base_model="org/other")], others[:2]):
        with pytest.raises(Unplaceable, match="no TrainingSession in namespace 'team' serves it"):
            place("org/small", "team", sessions, catalogue(), needs_slot=True, only="mine")
    full = [*others[:2], view("mine", model_count=16)]
    assert place("org/small", "team", full, catalogue(), needs_slot=True, only="mine") == full[2]


def test_a_sampling_session_takes_no_room() -> None:
    """A full session still samples."""
    full = view("a", model_count=16)
    assert place("org/small", "team", [full], catalogue(), needs_slot=False) == full
    assert isinstance(place("org/small", "team", [full], catalogue(), needs_slot=True), Create)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("org/smal", "(did you mean 'org/small'?)"),
        ("ORG/SMALL", "(did you mean 'org/small'?)"),
        ("smalll", "(did you mean 'small'?)"),
        ("nothing-like-it", "known: org/small"),
        ("absent", "known: org/small"),
    ],
)
@pytest.mark.parametrize(("sessions", "entries"), [([VIEW], CATALOGUE), ([], catalogue())])
def test_an_unknown_base_model_gets_near_names(
    asked: str, hint: str, sessions: list[SessionView], entries: tuple[CatalogueEntry, ...]
) -> None:
    """The message says what was asked, where, and what is served or would be."""
    with pytest.raises(Unplaceable) as caught:
        place(asked, "team", sessions, entries, needs_slot=True)
    assert str(caught.value).startswith(f"base_model {asked!r}: no TrainingSession in namespace 'team' serves it")
    assert str(caught.value).endswith(hint)


def test_a_claim_that_is_not_there_is_a_mistake_until_there_is_a_pod() -> None:
    """It is waited for, in the operator's words; a pod that runs has all that it needs."""
    lacking = view("a", missing_claim='PersistentVolumeClaim "journal" does not exist', claim=Claim("journal", ""))
    found = place("org/small", "team", [lacking], CATALOGUE, needs_slot=True)
    assert found == Wait('TrainingSession team/a: PersistentVolumeClaim "journal" does not exist', mistaken=True)
    serving = replace(lacking, claim=VIEW.claim, incarnation=Incarnation(1, "uid-pod", "10.0.0.1"))
    assert place("org/small", "team", [serving], CATALOGUE, needs_slot=True) == serving


@pytest.mark.parametrize(
    ("sessions", "limit", "made"),
    [
        ([], 1, FIRST),
        ([view("a", base_model="org/other")], 1, FIRST),
        ([view(FIRST, namespace="other")], 1, FIRST),
        ([view("mine", phase="Failed")], 1, FIRST),
        ([view("mine", model_count=16)], 1, FIRST),
        ([view("mine", deleting=True)], 1, FIRST),
        ([view(FIRST, model_count=16)], 2, SECOND),
        ([view(FIRST, phase="Failed")], 2, SECOND),
        ([view(FIRST, base_model="org/other")], 2, SECOND),
        ([view(SECOND, model_count=16)], 2, FIRST),
    ],
)
def test_the_session_that_is_made(sessions: list[SessionView], limit: int, made: str) -> None:
    """None has room for the model: the first derived name that nobody has."""
    for asked in ("org/small", "small"):
        found = place(asked, "team", sessions, catalogue(limit=limit), needs_slot=True)
        assert isinstance(found, Create)
        assert (found.name, found.base_model) == (made, "org/small")


@pytest.mark.parametrize(
    ("sessions", "words"),
    [
        ([view(FIRST, model_count=16)], f"TrainingSession team/{FIRST} has 16 of 16 models (spec.adapters.maxModels)"),
        ([view(FIRST, phase="Failed", explanation="no budget")], f"TrainingSession team/{FIRST} is Failed: no budget"),
        (
            [view(FIRST, base_model="org/other")],
            f"TrainingSession team/{FIRST} has the name that would be given, and serves org/other",
        ),
    ],
)
def test_the_limit_says_what_stands_at_it(sessions: list[SessionView], words: str) -> None:
    """Full, failed, or somebody else's under the derived name: each is named."""
    with pytest.raises(Unplaceable) as caught:
        place("small", "team", sessions, catalogue(), needs_slot=True)
    assert str(caught.value) == f"base_model 'small': the limit of 1 in the catalogue is reached: {words}"


def test_a_name_that_is_about_to_be_free_is_waited_for() -> None:
    """A session in deletion neither serves nor counts, and its name cannot be had yet."""
    found = place("org/small", "team", [view(FIRST, deleting=True)], catalogue(limit=2), needs_slot=True)
    assert found == Wait(f"TrainingSession team/{FIRST} is being deleted")


@pytest.mark.parametrize("entries", [CATALOGUE, catalogue(namespaces=("elsewhere",))])
def test_nothing_is_made_where_the_catalogue_does_not_say_so(entries: tuple[CatalogueEntry, ...]) -> None:
    """No template, or not for this namespace: refused, or left to the session itself if it is only full."""
    full, failed = view("a", model_count=16), view("a", phase="Failed", explanation="no budget")
    assert place("org/small", "team", [full], entries, needs_slot=True) == full
    for sessions, words in (([], "known: none"), ([failed], "TrainingSession team/a is Failed: no budget")):
        with pytest.raises(Unplaceable, match=f"{re.escape(words)}$"):
            place("org/small", "team", sessions, entries, needs_slot=True)


def test_a_default_that_failed_is_not_passed_over() -> None:
    """Whoever labelled it meant this one; making another would hide that it needs care."""
    sessions = [view("a", phase="Failed", default=True), view("b")]
    with pytest.raises(Unplaceable, match="team/a is Failed"):
        place("org/small", "team", sessions, catalogue(), needs_slot=True)


@pytest.mark.parametrize("base_model", ["org/small", "Qwen/Qwen3-VL-8B_Instruct.v2", "x" * 253, "org/\u00fc\u00fc"])
@pytest.mark.parametrize("number", [1, 2, 100])
def test_derived_names_are_names(base_model: str, number: int) -> None:
    """The CRD accepts each, whatever the base model is called."""
    name = session_name(base_model, number)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= MAX_NAME_LENGTH


def test_derived_names_differ() -> None:
    """By organization, spelling and number; and one never changes, or a session would be made again."""
    models = ("org/small", "gro/small", "org/Small", "org/small-2")
    found = {session_name(model, number) for model in models for number in (1, 2, 3)}
    assert len(found) == 12
    assert session_name("HuggingFaceTB/SmolLM2-135M-Instruct", 2) == "smollm2-135m-instruct-b68b303b-2"


def test_the_session_is_the_template_with_its_base_model() -> None:
    """Labels that say who made it cannot be overruled; annotations and the rest of spec are the template's."""
    given = template(
        metadata={"labels": {"team": "x", names.LABEL_CREATED_BY: "me"}, "annotations": {"note": "y"}},
        spec={"adapters": {"maxModels": 4}},
    )
    made = session_manifest("org/small", given, "team", FIRST)
    assert made["metadata"] == {
        "name": FIRST,
        "namespace": "team",
        "labels": {"team": "x", names.LABEL_CREATED_BY: "gateway", names.LABEL_MANAGED_BY: "everloop"},
        "annotations": {"note": "y"},
    }
    assert made["spec"] == {
        "adapters": {"maxModels": 4},
        "baseModel": {"name": "org/small", "source": {"claim": {"claimName": "models"}}},
    }


ENTRY = {"name": "a", "source": {}, "sessionTemplate": {"spec": {}}}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, ""),
        ({}, ""),
        ([3], "[0]"),
        ([{}], "[0].name"),
        ([{"name": "a", "aliases": "b"}], "[0].aliases"),
        ([{"name": "a", "tokenizer_id": 1}], "[0].tokenizer_id"),
        ([{**ENTRY, "source": None}], "[0].source"),
        ([{**ENTRY, "sessionTemplate": 3}], "[0].sessionTemplate"),
        ([{**ENTRY, "sessionTemplate": {}}], "[0].sessionTemplate.spec"),
        ([{**ENTRY, "sessionTemplate": {"spec": {}, "kind": "x"}}], "[0].sessionTemplate: kind"),
        ([{**ENTRY, "sessionTemplate": {"spec": {}, "metadata": {"name": "x"}}}], "[0].sessionTemplate: name"),
        ([{**ENTRY, "sessionTemplate": {"spec": {"baseModel": {}}}}], "[0].sessionTemplate.spec.baseModel"),
        ([{**ENTRY, "limit": 0}], "[0].limit"),
        ([{**ENTRY, "limit": True}], "[0].limit"),
        ([{**ENTRY, "namespaces": "team"}], "[0].namespaces"),
    ],
)
def test_a_wrong_catalogue_is_refused(value: object, named: str) -> None:
    """By field."""
    with pytest.raises(InvalidCatalogue) as caught:
        catalogue_entries(value)
    assert str(caught.value).startswith(f"catalogue.json{named}")
