"""An answer that may take its time: the ASGI side of holding a call while the session behind it recovers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from starlette.types import Receive, Scope, Send

from everloop_gateway.holding import (
    REQUEST_TIMEOUT,
    SPACE_EVERY_SECONDS,
    BeginStream,
    KeepWaiting,
    Kind,
    next_step,
)
from everloop_gateway.metrics import CALLS
from everloop_gateway.upstream import Answer, Progress
from everloop_gateway.wire import JSON

SERVICE_UNAVAILABLE = 503
# A 5xx at once makes a client that polls spin: whatever defect it is, it is told slowly.
DEFECT_SECONDS = 5.0

log = structlog.get_logger(__name__)


class HeldResponse:
    """Runs the work of one call and answers its client in time.

    An error that is found out after the streamed 200 has begun cannot be told any more: the connection is dropped,
    the client repeats the call at once and gets the error properly.
    """

    def __init__(
        self,
        kind: Kind,
        work: Callable[[Progress], Awaitable[Answer]],
        draining: asyncio.Event,
        request_id: str = "",
    ) -> None:
        self._kind = kind
        self._work = work
        self._draining = draining
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, drop or give up; the work ends in any case."""
        progress = Progress()
        work = asyncio.ensure_future(self._work(progress))
        gone: asyncio.Future[Any] = asyncio.ensure_future(disconnected(receive))
        drain: asyncio.Future[Any] = asyncio.ensure_future(self._draining.wait())
        try:
            with CALLS.under_way(self._kind, progress):
                await self._answer(work, gone, drain, progress, send)
        finally:
            for task in (work, gone, drain):
                task.cancel()
            await asyncio.gather(work, gone, drain, return_exceptions=True)

    async def _answer(
        self,
        work: asyncio.Future[Answer],
        gone: asyncio.Future[Any],
        drain: asyncio.Future[Any],
        progress: Progress,
        send: Send,
    ) -> None:
        started = time.monotonic()
        while True:
            step = next_step(self._kind, time.monotonic() - started, progress.outage(), progress.sent)
            seconds = step.seconds if isinstance(step, KeepWaiting) else 0.0
            await asyncio.wait([work, gone, drain], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                if work.exception() is not None:
                    await asyncio.wait([gone, drain], timeout=DEFECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                await send_answer(send, work.result())
            elif gone.done():
                pass
            elif drain.done():
                # Another replica takes the repeat.
                status = REQUEST_TIMEOUT if self._kind.polls else SERVICE_UNAVAILABLE
                await send_answer(send, self._not_yet(status, "this gateway is shutting down"), close=True)
            elif isinstance(step, BeginStream):
                log.debug("call held", kind=self._kind.value, reason=progress.reason)
                await self._stream(work, gone, drain, send)
            elif not isinstance(step, KeepWaiting):
                # Not on this connection again: this replica may be the only one that is cut off from what it needs.
                await send_answer(send, self._not_yet(step.status, progress.reason), close=True)
            else:
                continue
            return

    async def _stream(
        self, work: asyncio.Future[Answer], gone: asyncio.Future[Any], drain: asyncio.Future[Any], send: Send
    ) -> None:
        headers = [(b"content-type", JSON.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not (work.done() or gone.done() or drain.done()):
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.wait([work, gone, drain], timeout=SPACE_EVERY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            answer = work.result()
            if answer.status == 200 and answer.content_type.startswith(JSON):
                await send({"type": "http.response.body", "body": answer.body, "more_body": False})
        # Otherwise the body stays incomplete, and the server closes the connection.

    def _not_yet(self, status: int, reason: str) -> Answer:
        if self._kind is not Kind.POLL:
            return error_answer(status, reason)
        value = {
            "type": "try_again",
            "request_id": self._request_id,
            "queue_state": "paused_capacity" if reason else "active",
            "queue_state_reason": reason,
        }
        return Answer(status, JSON, json.dumps(value).encode())


def error_answer(status: int, detail: str) -> Answer:
    """An error in the form that the SDK shows."""
    return json_answer({"detail": detail}, status)


def json_answer(value: object, status: int = 200) -> Answer:
    """An answer of our own."""
    return Answer(status, JSON, json.dumps(value).encode())


async def send_answer(send: Send, answer: Answer, close: bool = False) -> None:
    """Send a complete answer; with `close`, the client is not to use this connection again."""
    headers = [
        (b"content-type", answer.content_type.encode()),
        (b"content-length", str(len(answer.body)).encode()),
        *([(b"connection", b"close")] if close else []),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
