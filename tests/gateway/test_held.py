"""What a call that must wait is told, and on which connection it comes again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from everloop_gateway import held, holding
from everloop_gateway.held import HeldResponse
from everloop_gateway.holding import Kind
from everloop_gateway.upstream import Answer, Progress


async def answered(kind: Kind, work: Any) -> list[dict[str, Any]]:
    """What is sent to a client that stays."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def send(message: Any) -> None:
        sent.append(message)

    await HeldResponse(kind, work, asyncio.Event())({}, receive, send)
    return sent


@pytest.mark.parametrize(
    ("kind", "limit", "status"),
    [
        (Kind.POLL, "POLL_ANSWER_SECONDS", 408),
        (Kind.SAMPLE, "SAMPLE_ANSWER_SECONDS", 429),
    ],
)
async def test_a_call_without_an_answer_comes_again_on_another_connection(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, limit: str, status: int
) -> None:
    """A replica that is cut off, from the API server or from the pod, keeps no client: the repeat may reach another."""
    monkeypatch.setattr(holding, limit, 0.1)

    async def cut_off(progress: Progress) -> Answer:
        progress.reason = "the Kubernetes API refuses the gateway"
        await asyncio.Event().wait()
        raise AssertionError("never set")

    start, _ = await asyncio.wait_for(answered(kind, cut_off), 10)
    assert start["status"] == status
    assert (b"connection", b"close") in start["headers"]


async def test_an_answer_of_the_session_keeps_the_connection() -> None:
    """Also if it is that there is no result yet."""

    async def pending(_progress: Progress) -> Answer:
        return Answer(408, "application/json", b"{}")

    start, _ = await answered(Kind.POLL, pending)
    assert start["status"] == 408
    assert b"connection" not in dict(start["headers"])


async def test_a_defect_is_told_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients repeat a poll at once after a 5xx; one that fails for ever must not make them spin."""
    monkeypatch.setattr(held, "DEFECT_SECONDS", 0.3)

    async def broken(_progress: Progress) -> Answer:
        raise LookupError("a defect")

    started = time.monotonic()
    with pytest.raises(LookupError):
        await answered(Kind.POLL, broken)
    assert time.monotonic() - started >= 0.3
