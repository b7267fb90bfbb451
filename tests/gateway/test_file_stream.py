"""What Python's urllib, which never repeats and never resumes, sees of a file whose pod is away."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from everloop_gateway.downloads import REDIRECTS, again
from everloop_gateway.file_stream import End, FileStream, Head, Item
from everloop_gateway.held import error_answer
from everloop_gateway.upstream import Progress
from tests.networks import new_address
from tests.server.in_thread import served

Script = Callable[[asyncio.Queue[Item]], Awaitable[None]]
PATIENCE, PULSE, TIMEOUT = 0.05, 0.1, 0.5
PORT = 8080


class Scripted(FileStream):
    """Has come what a test says, instead of what pods have."""

    def __init__(self, script: Script, query: dict[str, str]) -> None:
        nobody: Any = None
        super().__init__(nobody, nobody, "path", {}, again(query), PATIENCE, PULSE)
        self._script = script

    async def _fetch(self, progress: Progress) -> None:
        progress.waits("its pod is away")
        await self._script(self._items)


@contextmanager
def serving(script: Script) -> Iterator[tuple[str, list[int]]]:
    """A URL of such a file, and the query of each request for it."""
    asked, ip = list[int](), new_address()

    async def file(request: Request) -> FileStream:
        asked.append(int(request.query_params.get("waited", 0)))
        return Scripted(script, dict(request.query_params))

    routes: Any = [Route("/a:b/file", file)]
    with served(Starlette(routes=routes), ip, PORT, httpx.AsyncClient()):
        yield f"http://{ip}:{PORT}/a:b/file?expires=1&mac=ab", asked


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        content: bytes = response.read()
        return content


def test_a_client_is_sent_on_while_there_is_no_pod() -> None:
    """As often as urllib goes, each time before it would give up; then it is told why."""

    async def nothing(_items: asyncio.Queue[Item]) -> None:
        await asyncio.Event().wait()

    with serving(nothing) as (url, asked):
        with pytest.raises(urllib.error.HTTPError) as refused:
            read(url)
        assert (refused.value.code, refused.value.read()) == (503, b'{"detail": "its pod is away"}')
        refused.value.close()
    assert asked == list(range(REDIRECTS + 1))


def test_who_was_sent_on_gets_the_file() -> None:
    """From whoever answers in the end."""
    times = iter(range(3))

    async def third_time(items: asyncio.Queue[Item]) -> None:
        if next(times) < 2:
            await asyncio.Event().wait()
        for item in (Head(200, ()), b"con", b"tent", End()):
            await items.put(item)

    with serving(third_time) as (url, asked):
        assert read(url) == b"content"
    assert asked == [0, 1, 2]


def test_a_client_hears_something_while_its_pod_is_replaced() -> None:
    """For longer than the silence that it bears: bytes of what had come already, and then the rest."""

    async def interrupted(items: asyncio.Queue[Item]) -> None:
        await items.put(Head(200, ()))
        await items.put(b"first")
        await items.put(b"abcdefghijklmnopqrstuvwxyz")
        await asyncio.sleep(1.5 * TIMEOUT)
        await items.put(b"last")
        await items.put(End())

    with serving(interrupted) as (url, _):
        assert read(url) == b"firstabcdefghijklmnopqrstuvwxyzlast"


def test_what_breaks_off_is_never_taken_for_the_whole() -> None:
    """Not by a client that reads to the end of the connection either."""

    async def removed(items: asyncio.Queue[Item]) -> None:
        await items.put(Head(200, ()))
        await items.put(b"first")
        await items.put(b"second")
        await items.put(error_answer(404, "its checkpoint was removed"))

    with serving(removed) as (url, _), urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        assert response.read(5) == b"first"
        with pytest.raises(http.client.IncompleteRead):
            list(iter(lambda: response.read(8192), b""))
