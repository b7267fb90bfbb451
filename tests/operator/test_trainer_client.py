"""The operator's question to a session pod, whose image, and so whose answer, is the tenant's choice."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from everloop_operator.cluster import trainer
from everloop_operator.cluster.trainer import TrainerClient
from everloop_operator.loop.ports import Unanswered

ADDRESS = "127.78.99.1"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def pod(answer: Answer) -> AsyncIterator[TrainerClient]:
    """A client of a pod that reads a request and then answers like this."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except OSError:
            pass  # the client has seen enough
        finally:
            writer.close()

    server = await asyncio.start_server(serve, ADDRESS, 0)
    client = TrainerClient(server.sockets[0].getsockname()[1])
    try:
        yield client
    finally:
        await client.close()
        server.close()


async def test_report_is_read() -> None:
    """An ordinary answer."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"state":"Serving"}')

    async with pod(answer) as client:
        assert (await client.ask(ADDRESS, "t")).serving


async def test_trickle_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps no request open beyond the limit, which holds for the answer as a whole."""
    monkeypatch.setattr(trainer, "TIMEOUT_SECONDS", 0.5)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with pod(answer) as client:
        begin = time.monotonic()
        with pytest.raises(Unanswered, match="TimeoutError"):
            await asyncio.wait_for(client.ask(ADDRESS, "t"), 5)
        assert time.monotonic() - begin < 3


async def test_flood_is_cut_off() -> None:
    """An endless answer is not taken into memory."""
    sent = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing() and sent < 64 << 20:
            writer.write(b" " * 65536)
            sent += 65536
            await writer.drain()

    async with pod(answer) as client:
        with pytest.raises(Unanswered, match="too large"):
            await client.ask(ADDRESS, "t")
    assert sent < 32 << 20


async def test_compressed_answer_is_not_unpacked() -> None:
    """What was not asked for is not done: a small answer can't become a large one."""
    packed = gzip.compress(b" " * (64 << 20))

    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
        writer.write(head.encode() + packed)

    async with pod(answer) as client:
        with pytest.raises(Unanswered, match="can't be read"):
            await client.ask(ADDRESS, "t")
