"""Connections to session pods, counted where the kernel lists them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from everloop_gateway.connecting import MOST_CONNECTING
from everloop_gateway.upstream import http_client
from tests.networks import new_address

CALLS = 4 * MOST_CONNECTING
SYN_SENT = "02"
PATIENCE_SECONDS = 30.0


class Deaf:
    """A pod that takes no connection: the few that its kernel keeps for it are there already."""

    def __init__(self) -> None:
        self.listener = socket.create_server((new_address(), 0), backlog=0)
        self.host, self.port = self.listener.getsockname()
        self.first = [self._connect() for _ in range(3)]

    def _connect(self) -> socket.socket:
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex((self.host, self.port))
        return client

    def close(self) -> None:
        for each in (*self.first, self.listener):
            each.close()

    def connecting(self) -> int:
        """How many connections to it are being opened, but for the first."""
        ours = {f"{each.getsockname()[1]:04X}" for each in self.first}
        wanted = f"{int.from_bytes(socket.inet_aton(self.host), 'little'):08X}:{self.port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[2] == wanted and row[3] == SYN_SENT and row[1].split(":")[1] not in ours for row in rows)


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    pod = Deaf()
    yield pod
    pod.close()


async def full(pod: Deaf) -> None:
    """As many connections to it as may be are being opened."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while pod.connecting() < MOST_CONNECTING:  # noqa: ASYNC110 - the kernel says nothing
            await asyncio.sleep(0.01)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Of a pod that is well."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
    writer.close()


async def test_few_connections_are_opened_at_a_time(deaf: Deaf) -> None:
    """To one pod; the calls of another one do not wait for it."""
    well = await asyncio.start_server(answer, new_address(), 0, backlog=CALLS)
    host, port = well.sockets[0].getsockname()
    async with well, http_client() as http:
        held = [asyncio.create_task(http.get(f"http://{deaf.host}:{deaf.port}/")) for _ in range(CALLS)]
        await full(deaf)
        assert deaf.connecting() == MOST_CONNECTING
        others = await asyncio.gather(*(http.get(f"http://{host}:{port}/") for _ in range(CALLS)))
        assert {response.status for response in others} == {200}
        assert not any(task.done() and not task.exception() for task in held)
        assert deaf.connecting() <= MOST_CONNECTING
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_a_call_that_is_given_up_leaves_its_place(deaf: Deaf) -> None:
    """Before its turn, or while it connects: others are not held up by those that have gone."""
    async with http_client() as http:
        url = f"http://{deaf.host}:{deaf.port}/"
        for _ in range(3):
            held = [asyncio.create_task(http.get(url)) for _ in range(CALLS)]
            await full(deaf)
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
        with pytest.raises(aiohttp.ServerTimeoutError):
            await http.get(url)
