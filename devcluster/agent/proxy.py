"""A userland proxy: listens on the addresses of Services and forwards TCP connections to their pods in turn."""

from __future__ import annotations

import asyncio
import sys

from devcluster.agent.endpoints import Address

CHUNK = 1 << 16  # bytes
CONNECT_SECONDS = 5.0


class Proxy:
    """The listeners of all Services. A connection lives as long as its two ends do, whatever becomes of the Service."""

    def __init__(self) -> None:
        self._servers: dict[Address, asyncio.Server] = {}
        self._routes: dict[Address, list[Address]] = {}
        self._turn: dict[Address, int] = {}

    async def set_routes(self, routes: dict[Address, list[Address]]) -> None:
        """Listen on exactly the addresses in `routes`."""
        self._routes = routes
        for address in [a for a in self._servers if a not in routes]:
            self._servers.pop(address).close()
            self._turn.pop(address, None)
        for address in routes:
            if address not in self._servers:
                await self._listen(address)

    async def _listen(self, address: Address) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(address, reader, writer)

        try:
            self._servers[address] = await asyncio.start_server(accept, *address, limit=CHUNK)
        except OSError as e:  # tried again at the next change; the other Services go on
            print(f"listen on {address[0]}:{address[1]}: {e}", file=sys.stderr, flush=True)

    async def _serve(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backends = self._routes.get(address, [])
        turn = self._turn[address] = self._turn.get(address, -1) + 1
        for attempt in range(len(backends)):
            backend = backends[(turn + attempt) % len(backends)]
            try:
                there = await asyncio.wait_for(asyncio.open_connection(*backend, limit=CHUNK), CONNECT_SECONDS)
            except OSError:  # TimeoutError is one
                continue
            await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
            there[1].close()
            break
        else:
            writer.transport.abort()  # refused, as by a Service without endpoints
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the reader ends, then end the writer; a broken connection breaks the other side too."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()
