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
from everloop_operator.core import silence
from everloop_operator.core.observed import Trainer
from everloop_operator.core.plan import Poll
from everloop_operator.loop.lateness import Lateness
from everloop_operator.loop.poller import Poller
from everloop_operator.loop.ports import Key, Unanswered
from tests.networks import new_address
from tests.operator.one_cluster import clock

ADDRESS = new_address()
SERVING = b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\nConnection: close\r\n\r\n{"state":"Serving"}'
KEY = Key("team", "tuned")
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
        writer.write(SERVING)

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


@pytest.mark.parametrize(
    ("took", "late", "tells"),
    [(2.0, 0.0, True), (2.0, 0.49, True), (2.0, 0.5, False), (2.0, 2.0, False), (30.0, 28.0, False), (60.0, 1.0, True)],
)
def test_silence_counts_only_for_who_could_have_heard(took: float, late: float, tells: bool) -> None:
    """A quarter of the time may be lost."""
    assert silence.tells(took, late) is tells


async def test_lateness_counts_what_was_lost_before_the_sleeper_wakes() -> None:
    """Whoever runs first after a pause knows of it; a loop that is punctual loses next to nothing."""
    lateness = Lateness()
    measuring = asyncio.create_task(lateness.run())
    await asyncio.sleep(0)
    before = lateness.seconds()
    time.sleep(0.5)  # noqa: ASYNC251 - the pause
    lost = lateness.seconds() - before
    await asyncio.sleep(0.2)
    assert 0.3 < lost <= lateness.seconds() - before
    measuring.cancel()


async def test_an_operator_that_is_late_itself_blames_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that runs out of time while the process gets none leaves what was known; real silence counts."""
    monkeypatch.setattr(trainer, "TIMEOUT_SECONDS", 0.5)
    asked: list[Trainer] = []
    lateness = Lateness()

    async def answer(writer: asyncio.StreamWriter) -> None:
        asked.append(poller.answer(KEY, "u"))
        if len(asked) < 4:
            if len(asked) == 2:
                time.sleep(2)  # noqa: ASYNC251 - all of the loop stands still
            writer.write(SERVING)
        else:
            await asyncio.sleep(60)

    async with pod(answer) as client:
        woken = asyncio.Event()
        poller = Poller(client.answer, lambda _: woken.set(), clock, lateness)
        measuring = asyncio.create_task(lateness.run())
        poller.want(KEY, Poll(ADDRESS, "u", 1, 0.01), "t")
        async with asyncio.timeout(30):
            while poller.answer(KEY, "u").unreachable_since is None:
                await woken.wait()
                woken.clear()
        measuring.cancel()
        await poller.close()
    assert len(asked) >= 4, "the pause passed for silence"
    assert [known.report is not None for known in asked[1:4]] == [True, True, True]
