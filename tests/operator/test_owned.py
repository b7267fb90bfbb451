"""The adapter of the API server: how it keeps away from what is not ours, and how it waits for a busy server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from everloop_operator.cluster import kube, owned
from everloop_operator.cluster.kube import Kube
from everloop_operator.loop.ports import Absent, Body, ClusterError, Conflict, Forbidden, Refused
from everloop_operator.loop.scope import Scope

OWNER = "uid-session"
PATH = "/api/v1/namespaces/team/secrets/tuned-a1-token"


def child(kind: str = "Secret", owner: str = OWNER, **fields: Any) -> dict[str, Any]:
    owners = {"ownerReferences": [{"uid": owner}, {"uid": "uid-other"}]} if owner else {}
    return {
        "apiVersion": "policy/v1" if kind == "PodDisruptionBudget" else "v1",
        "kind": kind,
        "metadata": {"name": "tuned-a1-token", "namespace": "team", **owners},
        **(fields or {"data": {"token": "eA=="}}),
    }


TEST = {"op": "test", "path": "/metadata/ownerReferences/0/uid", "value": OWNER}


class Answering(Kube):
    """An API server with one answer, or error, for each call of a method; it remembers what it was asked."""

    def __init__(self, **answers: Body | Exception) -> None:
        super().__init__(client.Configuration(), "everloop-system", Scope())
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []
        self.types: list[str] = []

    async def _call(self, method: str, path: str, *, body: Any = None, **more: Any) -> dict[str, Any]:
        self.asked.append((method, path, body))
        self.types.append(more.get("content_type", ""))
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


@asynccontextmanager
async def answering(**answers: Body | Exception) -> AsyncIterator[Answering]:
    server = Answering(**answers)
    try:
        yield server
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("body", "guarded"),
    [
        (child(), True),
        (child("PodDisruptionBudget", spec={}), True),
        (child("Pod", spec={}), False),
        (child(owner=""), False),
    ],
    ids=["Secret", "PodDisruptionBudget", "Pod", "of nobody"],
)
async def test_children_that_may_not_be_read_are_made_and_not_applied(body: Body, guarded: bool) -> None:
    """Application would take over what somebody else has under the name."""
    async with answering(POST={"made": "anew"}, PATCH={"made": "applied"}) as server:
        answer = await server.apply(body)
        [(method, path, sent)] = server.asked
        assert (answer["made"], method, sent) == (
            "anew" if guarded else "applied",
            "POST" if guarded else "PATCH",
            body,
        )
        assert path.endswith("s" if guarded else "/tuned-a1-token")


@pytest.mark.parametrize(
    ("body", "change"),
    [
        (child(), {"op": "add", "path": "/data", "value": {"token": "eA=="}}),
        (
            child("PodDisruptionBudget", spec={"minAvailable": 1}),
            {"op": "add", "path": "/spec", "value": {"minAvailable": 1}},
        ),
    ],
    ids=["Secret", "PodDisruptionBudget"],
)
async def test_what_is_there_is_changed_only_if_it_is_the_owners(body: Body, change: Body) -> None:
    """The API server compares the owner before anything else of the patch."""
    async with answering(POST=Conflict("exists"), PATCH={"made": "changed"}) as server:
        assert (await server.apply(body))["made"] == "changed"
        method, path, sent = server.asked[-1]
        assert (method, path.rpartition("/")[2], sent) == ("PATCH", "tuned-a1-token", [TEST, change])
        assert server.types[-1] == "application/json-patch+json"


async def test_a_taken_name_is_told_as_such() -> None:
    """The API server's own words speak of a patch."""
    async with answering(POST=Conflict("exists"), PATCH=Refused("the server rejected our request")) as server:
        with pytest.raises(Forbidden, match='Secret "tuned-a1-token" exists already, and is not ours'):
            await server.apply(child())


@pytest.mark.parametrize("error", [Forbidden("no right"), ClusterError("500"), Absent("404")])
async def test_other_errors_are_told_in_their_own_words(error: ClusterError) -> None:
    """A right that is missing, or a child that was removed a moment ago, is no taken name."""
    async with answering(POST=Conflict("exists"), PATCH=error) as server:
        with pytest.raises(type(error), match=str(error)):
            await server.apply(child())
    async with answering(POST=error) as server:
        with pytest.raises(type(error), match=str(error)):
            await server.apply(child())


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (child("Pod", "uid-other"), Forbidden),
        (child("Pod", ""), Forbidden),
        (child("Pod"), Refused),
        (Absent("gone meanwhile"), Refused),
    ],
)
async def test_a_pod_that_is_refused_may_be_somebody_elses(
    found: Body | Exception, expected: type[ClusterError]
) -> None:
    """Its spec can't be changed to ours, which is not what is wrong."""
    async with answering(PATCH=Refused("spec: Forbidden"), GET=found) as server:
        with pytest.raises(ClusterError) as caught:
            await server.apply(child("Pod", spec={}))
        assert type(caught.value) is expected


async def test_a_secret_that_is_refused_is_not_read() -> None:
    """There is no right to."""
    async with answering(PATCH=Refused("too long")) as server:
        with pytest.raises(Refused, match="too long"):
            await server.apply(child(owner=""))
        assert [method for method, *_ in server.asked] == ["PATCH"]


# --- deletion -------------------------------------------------------------------------------------------------------


async def test_a_secret_is_deleted_as_the_owners_and_as_the_very_same() -> None:
    """Its UID is learned from the test of its owner; another that has taken its name since is left."""
    async with answering(PATCH={"metadata": {"uid": "uid-secret"}}, DELETE={}) as server:
        await server.delete_owned_secret("team", "tuned-a1-token", owner=OWNER)
        assert server.asked == [
            ("PATCH", PATH, [TEST]),
            ("DELETE", PATH, {"preconditions": {"uid": "uid-secret"}}),
        ]
        assert server.types[0] == "application/json-patch+json"


@pytest.mark.parametrize("error", [Refused("not the owner"), Absent("gone")])
async def test_a_secret_of_somebody_else_is_not_deleted(error: ClusterError) -> None:
    """Nor is it an error that there is none."""
    async with answering(PATCH=error, DELETE={}) as server:
        await server.delete_owned_secret("team", "tuned-a1-token", owner=OWNER)
        assert [method for method, *_ in server.asked] == ["PATCH"]
    async with answering(PATCH={"metadata": {"uid": "u"}}, DELETE=error) as server:
        await server.delete_owned_secret("team", "tuned-a1-token", owner=OWNER)


@pytest.mark.parametrize("error", [Forbidden("no right"), ClusterError("500"), Conflict("another one")])
async def test_a_deletion_that_failed_is_tried_again(error: ClusterError) -> None:
    """It is no object of somebody else's; whose it is that has taken its name, the test of the owner says then."""
    for answers in ({"PATCH": error}, {"PATCH": {"metadata": {"uid": "u"}}, "DELETE": error}):
        async with answering(**answers) as server:
            with pytest.raises(type(error)):
                await server.delete_owned_secret("team", "tuned-a1-token", owner=OWNER)


@pytest.mark.parametrize("force", [True, False])
async def test_pods_and_sessions_are_deleted_by_their_uid(force: bool) -> None:
    """What has taken the name of one that is gone stays."""
    async with answering(DELETE={}) as server:
        await server.delete_pod("team", "tuned-a1-0", uid="uid-pod", force=force)
        await server.delete_session("team", "tuned", uid=OWNER)
        options = [body for _, _, body in server.asked]
    grace = {"gracePeriodSeconds": 0} if force else {}
    assert options == [{"preconditions": {"uid": "uid-pod"}, **grace}, {"preconditions": {"uid": OWNER}}]
    another: Body = {"metadata": {"uid": "uid-another"}}
    for gone, found in ((Absent("gone"), another), (Conflict("UID"), another), (Conflict("UID"), Absent("gone since"))):
        async with answering(DELETE=gone, GET=found) as server:
            await server.delete_pod("team", "tuned-a1-0", uid="uid-pod", force=force)
            await server.delete_session("team", "tuned", uid=OWNER)


async def test_a_deletion_that_met_a_conflict_is_tried_again() -> None:
    """What is still there under its UID is not gone, whatever the API server has stumbled over."""
    async with answering(DELETE=Conflict("please try again"), GET={"metadata": {"uid": OWNER}}) as server:
        with pytest.raises(Conflict):
            await server.delete_pod("team", "tuned-a1-0", uid=OWNER, force=False)
        with pytest.raises(Conflict):
            await server.delete_session("team", "tuned", uid=OWNER)


def test_the_owner_is_the_first_one() -> None:
    """That is the one which the patch tests."""
    assert owned.owner_of(child()) == OWNER
    assert owned.owner_of(child(owner="")) == ""


# --- a busy API server ----------------------------------------------------------------------------------------------


class Busy:
    """An HTTP server that has too much to do for a while."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.asked = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        status = self.statuses.pop(0) if self.statuses else 200
        headers = {"Retry-After": str(self.asked)} if status in (429, 503) else {}
        return web.json_response({"message": "much to do"}, status=status, headers=headers)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it was waited each time, without waiting."""
    times: list[float] = []

    class Clockwork:
        Semaphore = asyncio.Semaphore

        @staticmethod
        async def sleep(seconds: float) -> None:
            times.append(seconds)

    monkeypatch.setattr(kube, "asyncio", Clockwork)
    return times


@asynccontextmanager
async def before(busy: Busy) -> AsyncIterator[Kube]:
    app = web.Application()
    app.router.add_get("/{path:.*}", busy.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    server = Kube(client.Configuration(host=address), "everloop-system", Scope())
    try:
        yield server
    finally:
        await server.close()
        await runner.cleanup()


async def test_a_busy_server_is_asked_again_when_it_says(slept: list[float]) -> None:
    """As long after each answer as that has said, and then its answer counts."""
    busy = Busy(429, 429)
    async with before(busy) as server:
        assert await server.pod("team", "tuned-a1-0") == {"message": "much to do"}
    assert (busy.asked, slept) == (3, [1.0, 2.0])


async def test_a_server_that_stays_busy_is_an_error_in_the_end(slept: list[float]) -> None:
    """After so many tries, and no wait for nothing."""
    busy = Busy(*[429] * (kube.TRIES + 5))
    async with before(busy) as server:
        with pytest.raises(ClusterError, match="429: much to do"):
            await server.pod("team", "tuned-a1-0")
    assert (busy.asked, len(slept)) == (kube.TRIES, kube.TRIES - 1)


@pytest.mark.parametrize(("status", "error"), [(503, ClusterError), (404, Absent), (403, Forbidden), (409, Conflict)])
async def test_nothing_else_is_asked_again(slept: list[float], status: int, error: type[ClusterError]) -> None:
    """The pass is repeated for it, from a new observation."""
    busy = Busy(status)
    async with before(busy) as server:
        with pytest.raises(ClusterError) as caught:
            await server.pod("team", "tuned-a1-0")
    assert (type(caught.value), busy.asked, slept) == (error, 1, [])


async def test_who_was_told_to_wait_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one request at a time, another is answered meanwhile."""
    monkeypatch.setattr(kube, "CONCURRENT_REQUESTS", 1)
    waiting, go_on = asyncio.Event(), asyncio.Event()

    class Clockwork:
        Semaphore = asyncio.Semaphore

        @staticmethod
        async def sleep(_: float) -> None:
            waiting.set()
            await go_on.wait()

    monkeypatch.setattr(kube, "asyncio", Clockwork)
    async with before(Busy(429)) as server:
        first = asyncio.create_task(server.pod("team", "tuned-a1-0"))
        await asyncio.wait_for(waiting.wait(), 10)
        await asyncio.wait_for(server.pod("team", "tuned-a2-0"), 10)
        assert not first.done()
        go_on.set()
        await asyncio.wait_for(first, 10)
