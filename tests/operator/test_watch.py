"""How kopf is told to watch: what keeps an operator from being alive and blind, or paused by a stranger."""

from __future__ import annotations

import kopf

from everloop_operator.cluster import watch
from everloop_operator.loop import resync

BOOKMARK_SECONDS = 60.0
"""So often the API server says something on a watch on which nothing happens."""


def test_a_silent_watch_is_given_up() -> None:
    """After more than a bookmark's time, so that quiet is no silence, and well before anybody waits for a resync."""
    silence = watch.settings().watching.inactivity_timeout
    assert BOOKMARK_SECONDS < silence < 2 * BOOKMARK_SECONDS < resync.PERIOD_SECONDS


def test_every_call_of_a_watch_is_bounded() -> None:
    """No connection is waited for without a limit."""
    networking = watch.settings().networking
    assert 0 < (networking.connect_timeout or 0) <= 10
    assert 0 < (networking.request_timeout or 0) <= 60


def test_no_peering_object_pauses_us() -> None:
    """Another operator's priorities are its own."""
    assert watch.settings().peering.standalone


def test_no_object_is_copied_to_be_compared() -> None:
    """kopf compares what it has seen with what it was when a handler ran; ours compare for themselves."""
    storage = watch.settings().persistence.diffbase_storage
    assert storage.build(body=kopf.Body({"metadata": {"name": "a"}, "spec": {"b": 1}})) == {}
