"""How kopf is told to watch: what keeps an operator from being alive and blind, or paused by a stranger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import kopf
import pytest
from aiohttp import web

from everloop_operator.cluster import watch
from everloop_operator.cluster.unlisted import NOTHING, Unlisted
from everloop_operator.loop import resync
from everloop_operator.loop.scope import Scope

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


class Served:
    """An HTTP server that remembers what it was asked, and can fail."""

    def __init__(self) -> None:
        self.queries: list[dict[str, str]] = []
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        self.queries.append(dict(request.query))
        return web.Response(status=self.status)


@asynccontextmanager
async def asking(unlisted: Unlisted) -> AsyncIterator[tuple[Served, aiohttp.ClientSession]]:
    served, app = Served(), web.Application()
    app.router.add_get("/{path:.*}", served.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(address, middlewares=(unlisted,)) as session:
            yield served, session
    finally:
        await runner.cleanup()


async def test_lists_find_nothing_and_watches_are_sent_as_they_are() -> None:
    """What kopf lists would be worked through as if it had changed."""
    async with asking(Unlisted(9, lambda: None)) as (served, session):
        watched = {"watch": "true", "resourceVersion": "7", "labelSelector": "a=b"}
        await session.get("/pods", params=watched)
        await session.get("/pods", params={"limit": "1", "labelSelector": "a=b"})
    assert served.queries == [watched, {"labelSelector": "a=b", "fieldSelector": NOTHING, "resourceVersion": "0"}]


async def test_watches_have_begun_once_every_list_was_answered() -> None:
    """Not with one that failed, and not with the same one twice; every later one means that a watch was interrupted."""
    again: list[str] = []
    unlisted = Unlisted(2, lambda: again.append("again"))
    async with asking(unlisted) as (served, session):

        async def listed(path: str) -> bool:
            await session.get(path, params={"limit": "1"})
            return unlisted.begun.is_set()

        assert [await listed("/pods"), await listed("/pods")] == [False, False]
        served.status = 500
        assert not await listed("/nodes")
        served.status = 200
        assert (await listed("/nodes"), again) == (True, [])
        await session.get("/nodes", params={"watch": "true"})
        assert again == []
        assert (await listed("/pods"), again) == (True, ["again"])


@pytest.mark.parametrize(
    ("scope", "lists"),
    [(Scope(), 4), (Scope(nodes=False), 3), (Scope(("a", "b")), 7), (Scope(("a", "b"), nodes=False), 6)],
)
def test_one_list_for_each_watch(scope: Scope, lists: int) -> None:
    """In each of the listed namespaces; nodes belong to none."""
    assert watch.lists(scope) == lists
