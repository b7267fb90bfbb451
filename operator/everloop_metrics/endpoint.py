"""`GET /metrics` on the pod's own address, for whoever has the installation's metrics token.

The format is Prometheus' text exposition format 0.0.4.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest


@asynccontextmanager
async def listening(
    registry: CollectorRegistry, address: str, port: int, token: Callable[[], str | None]
) -> AsyncIterator[None]:
    """Serves a registry for as long as the block lasts.

    Args:
        registry: what is told.
        address: of this pod.
        port: to listen on.
        token: the bearer token to be shown; None while it is not known, and nobody is let in.

    Raises:
        OSError: the port is taken.
    """

    async def metrics(request: web.Request) -> web.Response:
        wanted = token()
        if wanted is None:
            return web.Response(status=503, headers={"Retry-After": "1"})
        shown = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(shown, f"Bearer {wanted}".encode()):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        yield
    finally:
        await runner.cleanup()
