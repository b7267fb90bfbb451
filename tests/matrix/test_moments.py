"""The pure parts of the matrix: what a journal proves, and what must have been replaced."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix.moments import KINDS, OF_THE_LOOP, QUIET, Facts, Moment, falls_in, flaws, gather, has_begun, news
from tests.matrix.victims import NEW_ATTEMPT, Victim, oddities

MODEL = "s:train:1"
OPEN = {"t": "open", "n": 3, "attempt": 2}
IN_ONE = [moment for moment in OF_THE_LOOP if moment not in QUIET | {Moment.ACCEPTED, Moment.BETWEEN_CHUNKS}]


def _accept(number: int, kind: str) -> dict[str, Any]:
    return {"t": "accept", "s": MODEL, "n": number, "k": kind}


def _try(number: int) -> dict[str, Any]:
    return {"t": "try", "s": MODEL, "n": number, "engine": 30}


def _result(number: int, *, ok: bool = True) -> dict[str, Any]:
    return {"t": "result", "s": MODEL, "n": number, "ok": ok, "err": None if ok else "why"}


def _falls(moment: Moment, *records: dict[str, Any], stored: bool = False) -> bool:
    known = {(MODEL, 0)}
    manifests = {f"{MODEL}:1"} if stored else set()
    return falls_in(moment, gather([OPEN, *records]), known, manifests)


@pytest.mark.parametrize("moment", IN_ONE)
def test_moment_in_an_operation_lies_between_its_try_and_its_result(moment: Moment) -> None:
    """Before the try, after the result, or in another kind of operation it is not met."""
    stored = moment == Moment.AFTER_MANIFEST
    accept, other = _accept(1, KINDS[moment]), _accept(1, "something_else")
    assert _falls(moment, accept, _try(1), stored=stored)
    assert not _falls(moment, accept, stored=stored)
    assert not _falls(moment, accept, _try(1), _result(1), stored=stored)
    assert not _falls(moment, other, _try(1), stored=stored)
    assert not _falls(moment, {**accept, "n": 0}, {**_try(1), "n": 0}, stored=stored), "known before"


def test_accepted_is_what_was_not_tried() -> None:
    """Without an acceptance, or once it was handed to an engine, it is not met."""
    accept = _accept(1, "forward_backward")
    assert _falls(Moment.ACCEPTED, accept)
    assert not _falls(Moment.ACCEPTED)
    assert not _falls(Moment.ACCEPTED, _accept(1, "optim_step"))
    assert not _falls(Moment.ACCEPTED, accept, _try(1))


@pytest.mark.parametrize("moment", [Moment.BEFORE_MANIFEST, Moment.AFTER_MANIFEST])
def test_manifest_parts_the_two_moments_of_a_save(moment: Moment) -> None:
    """With a manifest it is the second one, without the first."""
    for stored in (False, True):
        met = _falls(moment, _accept(1, "save_weights"), _try(1), stored=stored)
        assert met == (stored == (moment == Moment.AFTER_MANIFEST))


def test_between_chunks_the_first_has_a_result_and_the_last_none() -> None:
    """One chunk alone, or two that ended, are not between chunks."""
    two = [_accept(2, "forward_backward"), _accept(1, "forward_backward")]
    assert not has_begun(Moment.BETWEEN_CHUNKS, gather([two[1], _try(1)]), ())
    assert has_begun(Moment.BETWEEN_CHUNKS, gather([*two, _try(1)]), ())
    assert not _falls(Moment.BETWEEN_CHUNKS, *two, _try(1))
    assert _falls(Moment.BETWEEN_CHUNKS, *two, _try(1), _result(1))
    assert _falls(Moment.BETWEEN_CHUNKS, *two, _try(1), _result(1), _try(2))
    assert not _falls(Moment.BETWEEN_CHUNKS, *two, _try(1), _result(1), _try(2), _result(2))
    assert not _falls(Moment.BETWEEN_CHUNKS, two[1], _try(1), _result(1))


def test_quiet_moments_have_nothing_under_way() -> None:
    """Between pass and step the last thing that ended was a pass; idle is whenever all have ended."""
    done = [_accept(1, "forward_backward"), _try(1), _result(1)]
    stepped = [*done, _accept(2, "optim_step"), _try(2), _result(2)]
    assert _falls(Moment.BETWEEN_PASS_AND_STEP, *done)
    assert not _falls(Moment.BETWEEN_PASS_AND_STEP, *stepped)
    assert _falls(Moment.IDLE, *stepped)
    for moment in QUIET:
        assert not _falls(moment, *stepped[:-1])
        assert not _falls(moment)


def test_flaws_are_what_did_not_happen_once() -> None:
    """Two acceptances, two results, no result, a failure and a second checkpoint are all told."""
    once = [_accept(1, "optim_step"), _try(1), _try(1), _result(1)]
    assert flaws(gather(once), ["a", "b"]) == []
    assert len(flaws(gather(once), ["a", "a"])) == 1
    for records in ([*once, once[0]], [*once, once[-1]], once[:-1], [*once[:-1], _result(1, ok=False)]):
        assert len(flaws(gather(records), [])) == 1, records


def _facts(attempt: int, incarnation: int, tries: int) -> Facts:
    opening = {"t": "open", "n": incarnation, "attempt": attempt}
    return gather([opening, _accept(1, "optim_step"), *[_try(1)] * tries])


@pytest.mark.parametrize("victim", Victim)
def test_what_was_killed_has_to_be_replaced(victim: Victim) -> None:
    """That attempt, incarnation and tries stay as they were is odd where they should be new, and only there."""
    before, same = _facts(1, 1, 1), _facts(1, 1, 1)
    keys = news(Moment.OPTIM_STEP, before, ())
    changes = {Victim.ENGINE: 1, Victim.SERVER: 2, Victim.SUPERVISOR: 2, **dict.fromkeys(NEW_ATTEMPT, 3)}
    assert len(oddities(victim, Moment.OPTIM_STEP, before, same, keys)) == changes.get(victim, 0)
    after = _facts(1 + (victim in NEW_ATTEMPT), 1 + (changes.get(victim, 0) > 1), 1 + (victim in changes))
    assert oddities(victim, Moment.OPTIM_STEP, before, after, keys) == []


@pytest.mark.parametrize("victim", [Victim.SPARE, Victim.ENGINE, Victim.OPERATOR, Victim.GATEWAY])
def test_what_was_not_killed_must_stay(victim: Victim) -> None:
    """A session that moved, or a server that was restarted, although something else was killed is odd."""
    before, keys = _facts(1, 1, 1), [(MODEL, 1)]
    assert len(oddities(victim, Moment.OPTIM_STEP, before, _facts(2, 2, 2), keys)) == 2
