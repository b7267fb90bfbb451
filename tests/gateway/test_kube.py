"""What the adapter of the Kubernetes API knows of its own standing."""

from __future__ import annotations

import asyncio

import pytest
from kubernetes.aio import client

from everloop_gateway.kube import ApiRefused, ApiUnavailable, Kube
from tests.networks import new_address

PATH = "/api/v1/namespaces/team/configmaps/binding"


async def test_an_outage_lasts_until_the_api_serves_again() -> None:
    """Being unknown (401), overloaded or unreachable counts from its first call on; any true answer ends it."""
    now, status = 100.0, "200 OK"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
        await writer.drain()
        writer.close()

    address = new_address()
    server = await asyncio.start_server(answer, address, 0)
    port = server.sockets[0].getsockname()[1]
    kube = Kube(client.ApiClient(client.Configuration(host=f"http://{address}:{port}")), lambda: now)
    try:
        await kube.get(PATH)
        assert kube.outage_seconds() == 0
        for refusal in ("401 Unauthorized", "503 Service Unavailable"):
            status = refusal
            with pytest.raises((ApiRefused, ApiUnavailable)):
                await kube.get(PATH)
            now += 10
        assert kube.outage_seconds() == 20
        status = "404 Not Found"
        assert await kube.get(PATH) is None
        assert kube.outage_seconds() == 0
        server.close()
        await server.wait_closed()
        with pytest.raises(ApiUnavailable):
            await kube.get(PATH)
        now += 5
        assert kube.outage_seconds() == 5
    finally:
        server.close()
        await kube.close()
