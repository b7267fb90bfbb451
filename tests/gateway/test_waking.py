"""Telling the operator that an idle session is needed: once for all who wait, and again while nothing happens."""

from __future__ import annotations

from everloop_gateway.kube import ApiUnavailable
from everloop_gateway.waking import REPEAT_SECONDS, Waker

KEY = ("team", "small")


async def test_one_request_for_all_who_wait_until_it_has_had_its_time() -> None:
    """Many calls, one patch; without effect it is repeated, and another session of the name is another matter."""
    told: list[str] = []
    now = 0.0

    async def wake(namespace: str, name: str, uid: str) -> None:
        told.append(f"{namespace}/{name}/{uid}")

    waker = Waker(wake, lambda: now)
    for _ in range(3):
        await waker.wake(KEY, "uid-1")
    assert told == ["team/small/uid-1"]
    await waker.wake(KEY, "uid-2")
    now = REPEAT_SECONDS
    await waker.wake(KEY, "uid-1")
    assert told == ["team/small/uid-1", "team/small/uid-2", "team/small/uid-1"]


async def test_an_api_server_that_is_away_is_no_error_of_the_call() -> None:
    """The call waits on, and its next look tries again."""

    async def wake(namespace: str, name: str, uid: str) -> None:
        raise ApiUnavailable("away")

    await Waker(wake).wake(KEY, "uid-1")
