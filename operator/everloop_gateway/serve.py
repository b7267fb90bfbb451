"""The serving process: cluster watches, HTTP server, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

import structlog
import uvicorn
from starlette.types import ASGIApp

from everloop_gateway import app, kube, metrics, upstream
from everloop_gateway.calls import Calls
from everloop_gateway.checkpoints import Checkpoints
from everloop_gateway.cluster import Cluster
from everloop_gateway.downloads import Downloads
from everloop_gateway.intents import Intents
from everloop_gateway.listings import Listings
from everloop_gateway.settings import Settings
from everloop_gateway.waking import Waker
from everloop_http.resources import allow_all_connections, give_back_at_once
from everloop_http.slow_readers import SlowReaders, http_protocol
from everloop_metrics.endpoint import listening
from everloop_operator.api import names, tokens

# Held calls are answered or dropped at once when the process is told to end; this bounds the writing of answers.
SHUTDOWN_SECONDS = 5
# Longer than the SDK's heartbeat period, so that its connections are not closed between two calls.
KEEP_ALIVE_SECONDS = 75
MOST_UNTAKEN_BYTES = 128 << 20
"""Of answers whose clients do not take them, beyond what the kernel holds."""

log = structlog.get_logger(__name__)


async def serve(settings: Settings) -> None:
    """Serve until a signal says otherwise."""
    allow_all_connections()
    give_back_at_once()
    draining = asyncio.Event()
    api = await kube.connect()
    http = upstream.http_client()
    try:
        cluster = Cluster(api, settings)
        pods = upstream.Upstream(cluster.sessions, cluster.bindings, http, cluster.master, Waker(cluster.wake))
        intents = Intents(api, settings.release_namespace, cluster.bindings, pods)
        calls = Calls(cluster, pods, intents, stand_ins=settings.stand_ins)
        listings = Listings(cluster, pods, calls)
        checkpoints = Checkpoints(pods, calls)
        downloads = Downloads(cluster, pods, calls)
        routes = app.App(
            cluster, calls, listings, checkpoints, downloads, draining, batched_polls=settings.batched_polls
        )
        server = _Server(metrics.Counting(app.build(routes)), settings.pod_ip, draining)
        async with _metrics_port(cluster, settings), asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(cluster.run()), tasks.create_task(intents.run(cluster.ready))]
            log.info("listening", address=settings.pod_ip, port=names.GATEWAY_PORT)
            await server.serve()
            for task in following:
                task.cancel()
    finally:
        await http.close()
        await api.close()


@asynccontextmanager
async def _metrics_port(cluster: Cluster, settings: Settings) -> AsyncIterator[None]:
    if not settings.metrics:
        yield
        return

    def token() -> str | None:
        return tokens.metrics_token(cluster.master()) if cluster.ready.is_set() else None

    async with listening(metrics.REGISTRY, settings.pod_ip, names.METRICS_PORT, token):
        yield


class _Server(uvicorn.Server):
    """Lets held calls know of the signal before the connections are waited for."""

    def __init__(self, application: ASGIApp, address: str, draining: asyncio.Event) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                host=address,
                port=names.GATEWAY_PORT,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                http=http_protocol(SlowReaders(MOST_UNTAKEN_BYTES)),
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._draining = draining

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._draining.set()
        super().handle_exit(sig, frame)
