"""A file of a session pod on its way to a client that can't go on where it was cut off.

Python's urllib, with which such files are fetched, neither repeats nor resumes a download, and gives up after a minute
of silence. So this connection is held while the pod is being replaced: what is missing is asked of the next pod, and
of what has come already something is kept back, to be sent byte by byte meanwhile. Before the first byte the client is
sent to the same address again before its minute is over.

The answer has no Content-Length on purpose: a client that knows the length, and reads to the end of the connection,
may take what was cut off for the whole. A chunked answer that breaks off is an error to every client.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog
from starlette.types import Receive, Scope, Send

from everloop_gateway import wire
from everloop_gateway.held import SERVICE_UNAVAILABLE, disconnected, error_answer, send_answer
from everloop_gateway.holding import SPACE_EVERY_SECONDS, Kind, is_definitive
from everloop_gateway.metrics import CALLS
from everloop_gateway.refusal import Refusal
from everloop_gateway.routing import Binding, Gone, Target
from everloop_gateway.stopped import GONE
from everloop_gateway.upstream import Answer, Call, Progress, Unanswered, Upstream, is_signed

SILENCE_SECONDS = 10.0
"""A pod that sends nothing for so long is frozen, or its node is gone without a word."""
FIRST_BYTE_SECONDS = 40.0
"""How long a client waits before it is told to come again."""
TEMPORARY_REDIRECT = 307
_RANGE = re.compile(r"bytes=[0-9]*-[0-9]*")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/[0-9]+")
_PASSED_ON = ("content-type", "content-range", "etag", "last-modified", "accept-ranges")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Head:
    """How the answer begins."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class End:
    """Everything has come."""


Item = Head | bytes | End | Answer


class FileStream:
    """The answer to one request for a file, or for one range of its bytes.

    Args:
        upstream: where pods are.
        binding: finds out where the file is; raises Refusal.
        path: of the file, at the pod.
        headers: of the request.
        again: what a client that has waited long is redirected to; empty if it has waited too long.
        patience: seconds that it waits.
        pulse: seconds between two signs of life.
    """

    def __init__(
        self,
        upstream: Upstream,
        binding: Callable[[Progress], Awaitable[Binding]],
        path: str,
        headers: Mapping[str, str],
        again: str,
        patience: float = FIRST_BYTE_SECONDS,
        pulse: float = SPACE_EVERY_SECONDS,
    ) -> None:
        self._upstream = upstream
        self._binding = binding
        self._path = path
        self._again = again
        self._patience = patience
        self._pulse = pulse
        # Of several ranges none could be continued: they may all be had with the whole.
        wanted = headers.get("range", "")
        self._range = {"Range": wanted} if _RANGE.fullmatch(wanted) else {}
        if self._range and "if-range" in headers:
            self._range["If-Range"] = headers["if-range"]
        self._next: int | None = None
        self._last = 0
        self._items: asyncio.Queue[Item] = asyncio.Queue(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, redirect or give up."""
        progress = Progress()
        work = asyncio.ensure_future(self._fetch(progress))
        gone: asyncio.Future[Any] = asyncio.ensure_future(disconnected(receive))
        try:
            with CALLS.under_way(Kind.QUERY, progress):
                await self._answer(work, gone, progress, scope["method"] == "HEAD", send)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(
        self, work: asyncio.Future[None], gone: asyncio.Future[Any], progress: Progress, bare: bool, send: Send
    ) -> None:
        first = await self._item(work, gone, self._patience)
        if isinstance(first, Answer):
            await send_answer(send, first)
        elif isinstance(first, Head):
            await send({"type": "http.response.start", "status": first.status, "headers": list(first.headers)})
            if bare:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                await self._pass_on(work, gone, send)
        elif not gone.done() and self._again:
            headers = [(b"location", self._again.encode()), (b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": TEMPORARY_REDIRECT, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif not gone.done():
            await send_answer(send, error_answer(SERVICE_UNAVAILABLE, progress.reason), close=True)

    async def _pass_on(self, work: asyncio.Future[None], gone: asyncio.Future[Any], send: Send) -> None:
        """Send what comes, one part behind; if nothing comes, a byte of that part now and then."""
        kept = b""
        while True:
            item = await self._item(work, gone, self._pulse)
            if gone.done():
                return
            if isinstance(item, End):
                await send({"type": "http.response.body", "body": kept, "more_body": False})
                return
            if isinstance(item, Answer):
                log.error("file is no more: download broken off", path=self._path, status=item.status)
                return  # the body stays incomplete, and the server closes the connection
            if isinstance(item, bytes):
                sent, kept = kept, item
            else:
                sent, kept = kept[:1], kept[1:]
            if sent:
                await send({"type": "http.response.body", "body": sent, "more_body": True})

    async def _item(self, work: asyncio.Future[None], gone: asyncio.Future[Any], seconds: float) -> Item | None:
        """The next one; None if none has come in time, or the client has gone. Raises what `work` raised."""
        getting = asyncio.ensure_future(self._items.get())
        try:
            coming: list[asyncio.Future[Any]] = [getting, gone]
            await asyncio.wait([*coming, work], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done() and work.done():
                work.result()
                await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            return getting.result() if getting.done() else None
        finally:
            getting.cancel()

    async def _fetch(self, progress: Progress) -> None:
        """Have everything come from whichever pod there is, in the order of the file."""
        try:
            binding = await self._binding(progress)
        except Refusal as refusal:
            await self._items.put(error_answer(refusal.status, refusal.detail))
            return
        done: End | Answer | Gone = await self._upstream.until_done(
            binding, Kind.QUERY, lambda target: self._copy(target, progress), progress
        )
        await self._items.put(error_answer(GONE, done.detail) if isinstance(done, Gone) else done)

    async def _copy(self, target: Target, progress: Progress) -> End | Answer | Unanswered:
        """What one pod has of what is missing. May be cancelled anywhere: only what was handed on counts."""
        if not self._missing():
            return End()
        resumed = self._next is not None
        headers = {"Range": f"bytes={self._next}-{self._last}"} if resumed else self._range
        call = Call(Kind.QUERY, self._path, b"", wire.JSON, "*/*", dict(headers), "GET")
        try:
            async with asyncio.timeout(SILENCE_SECONDS) as limit, self._upstream.open(target, call) as response:
                signed = is_signed(response, target)
                if not signed or not is_definitive(response.status):
                    return Unanswered(f"HTTP {response.status}")
                if response.status not in ((206,) if resumed else (200, 206)):
                    return Answer(response.status, wire.JSON, await response.read())
                limit.reschedule(None)
                progress.reason = ""
                if not resumed:
                    await self._begin(response)
                while self._missing():
                    limit.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)
                    part = await response.content.readany()
                    limit.reschedule(None)  # a slow client is no silent pod
                    if not part:
                        return Unanswered("it ended too early")
                    await self._items.put(part)
                    self._next = (self._next or 0) + len(part)
                return End()
        except aiohttp.ClientError as error:
            return Unanswered(type(error).__name__)
        except TimeoutError:
            return Unanswered(f"nothing for {SILENCE_SECONDS:.0f} s")

    def _missing(self) -> bool:
        return self._next is None or self._next <= self._last

    async def _begin(self, response: aiohttp.ClientResponse) -> None:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        first, last = (int(found[1]), int(found[2])) if found else (0, int(response.headers["content-length"]) - 1)
        told = [(name.encode(), response.headers[name].encode()) for name in _PASSED_ON if name in response.headers]
        told += [(b"cache-control", b"private, no-store"), (b"x-accel-buffering", b"no")]
        await self._items.put(Head(response.status, tuple(told)))
        self._next, self._last = first, last
