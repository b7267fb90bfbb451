"""An ASGI application of the tests, served from a thread of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import httpx
import uvicorn
from starlette.applications import Starlette

from tests.server.pod import eventually


@contextlib.contextmanager
def served(app: Starlette, ip: str, port: int, client: httpx.AsyncClient) -> Iterator[None]:
    """Serves `app` until the block ends; `client`, which it calls others with, is closed in the loop that used it."""
    config = uvicorn.Config(app, host=ip, port=port, log_level="warning", timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)

    async def serve() -> None:
        async with client:
            await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, f"a server on {ip}:{port}", 10)
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=10)
