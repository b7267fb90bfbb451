"""Connections to session pods: many of them, of which few are being opened at a time."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

import aiohttp
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

CONNECT_SECONDS = 3.0
"""A kernel whose queue of new connections is full drops the first packet, and is sent another one after a second."""
KEEP_ALIVE_SECONDS = 30.0
MOST_CONNECTING = 64
"""To one pod, which takes new connections in one thread beside all its other work."""


class Connector(aiohttp.TCPConnector):
    """Opens any number of connections, a few at a time to each pod, so that each has its time to come about.

    Thousands of calls are held while a pod is away, and all come back at once. Were all to connect at once, a pod that
    is short of CPU would take none of them in time, each would be given up and begun anew, and so for ever: what a pod
    then accepts has been given up already.
    """

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._places: WeakValueDictionary[ConnectionKey, asyncio.Semaphore] = WeakValueDictionary()

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        """A connection that is there, or a new one."""
        places = self._places.get(req.connection_key)
        if places is None:
            places = self._places[req.connection_key] = asyncio.Semaphore(MOST_CONNECTING)
        async with places:
            return await super().connect(req, traces, timeout)
