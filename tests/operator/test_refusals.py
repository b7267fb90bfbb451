"""When a pod that the API server does not have is for a person to mend."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from everloop_operator.core.refusals import Refusal, refused
from tests.operator.builders import NOW


def _told(seconds: list[float], generation: int = 1, *, forbidden: bool = True) -> Refusal:
    """After refusals at these times."""
    found = None
    for at in seconds:
        found = refused(found, "forbidden", NOW + timedelta(seconds=at), generation, forbidden=forbidden)
    assert found
    return found


def test_what_is_forbidden_may_be_allowed_in_a_moment() -> None:
    """An API server that has just started forbids what it allows later: only what stays forbidden stalls."""
    assert not _told([0]).settled
    assert not _told([0, 5, 10, 15]).settled
    assert _told([0, 5, 10, 15, 20]).settled
    assert _told([0, 5, 10, 15, 20, 50]).settled


def test_tries_are_frequent_only_while_it_may_pass() -> None:
    """Every 5 seconds at first, every 30 once it is settled."""
    assert _told([0, 5]).patience_seconds == 5
    assert _told([0, 5, 10, 15, 20]).patience_seconds == 30
    assert _told([0], forbidden=False).patience_seconds == 30


def test_what_is_invalid_is_settled_at_once() -> None:
    """Validation does not change its mind."""
    assert _told([0], forbidden=False).settled
    assert not replace(_told([0], forbidden=False), transient=True).settled


def test_another_spec_or_another_kind_of_refusal_starts_anew() -> None:
    """The time counts for one generation, and for what is forbidden only."""
    old = _told([0, 20])
    assert old.settled
    assert not refused(old, "forbidden", NOW + timedelta(seconds=21), 2, forbidden=True).settled
    invalid = refused(old, "invalid", NOW + timedelta(seconds=21), 1, forbidden=False)
    assert invalid.settled
    assert not refused(invalid, "forbidden", NOW + timedelta(seconds=22), 1, forbidden=True).settled
