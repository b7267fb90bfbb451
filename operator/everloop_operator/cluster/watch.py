"""kopf as an informer: the only module that imports it. Its handlers put what they see into the cache, no more.

Low-level handlers only: kopf then writes nothing, neither annotations nor finalizers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import kopf

from everloop_operator.api import names
from everloop_operator.loop.cache import Cache
from everloop_operator.loop.liveness import Liveness
from everloop_operator.loop.ports import Key
from everloop_operator.loop.scope import Scope
from everloop_operator.loop.work_queue import WorkQueue

from .kube import POD_SELECTOR, load_configuration
from .unlisted import Unlisted

OURS = tuple((names.GROUP, names.VERSION, plural) for plural in (names.TRAINING_SESSION_PLURAL, names.RL_JOB_PLURAL))
PODS, NODES = ("v1", "pods"), ("v1", "nodes")


class Uncompared(kopf.DiffBaseStorage):
    """kopf would copy each object whole to find what has changed in it since some handler ran; none here asks."""

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        """Nothing of an object counts as changed."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Nothing was stored."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is."""


def settings() -> kopf.OperatorSettings:
    """Every setting that is not a default, with its reason."""
    values = kopf.OperatorSettings()
    values.peering.standalone = True  # equal priorities would freeze everybody
    values.posting.enabled = False  # our events are posted by the adapter, after the status they tell of
    values.persistence.finalizer = names.KOPF_FINALIZER  # kopf removes its own name from objects: a name nobody uses
    values.persistence.diffbase_storage = Uncompared()
    values.queueing.idle_timeout = 0.05  # the task of an object that is at rest costs memory, and holds its body
    values.watching.chunk_size = 1  # marks lists for `Unlisted`; they are empty
    values.watching.label_selectors[PODS] = POD_SELECTOR  # filtered by the server, not after the download
    values.scanning.disabled = True  # no rights on CRDs and namespaces are needed; the CRD is there before we start
    values.networking.request_timeout = 30
    values.networking.connect_timeout = 5
    # An API server that is away for minutes: kopf's own delays would grow to 21 s, and then end the process.
    values.networking.error_backoffs = (1.0, 2.0, *[3.0] * 200)
    return values


def lists(scope: Scope) -> int:
    """How many lists kopf makes before all of its watches have begun."""
    return sum(len(scope.paths(f"/{resource[-1]}")) for resource in (*OURS, PODS, NODES))


def registry(
    cache: Cache, queue: WorkQueue, liveness: Liveness, stop: asyncio.Event, scope: Scope, unlisted: Unlisted
) -> kopf.OperatorRegistry:
    """The handlers: each is infallible, because kopf does not retry them. `stop` is set when kopf stops."""
    handlers = kopf.OperatorRegistry()
    watched: tuple[tuple[tuple[str, ...], Callable[..., set[Key]], Callable[..., set[Key]]], ...] = (
        *((resource, cache.put, cache.drop) for resource in OURS),
        (PODS, cache.put_pod, cache.drop_pod),
        *(((NODES, cache.put_node, cache.drop_node),) if scope.nodes else ()),
    )
    for resource, put, drop in watched:
        kopf.on.event(*resource, registry=handlers, id=resource[-1])(_handler(put, drop, queue))
    sessions: dict[kopf.ConnectionInfo, kopf.AiohttpSession] = {}

    async def login(**_: Any) -> kopf.AiohttpSession:
        """The same credentials as the adapter's; called again when a token has expired."""
        configuration = await load_configuration()
        header = (await configuration.auth_settings()).get("BearerToken", {}).get("value") or ""
        info = kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            token=header.split(" ", 1)[-1] or None,
        )
        # What the API server does not take must come back as the very same: kopf ends then, instead of trying for ever.
        if info not in sessions:
            sessions.clear()
            connector = aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context())
            session = aiohttp.ClientSession(
                connector=connector, headers=info.as_http_headers(), middlewares=(unlisted,)
            )
            sessions[info] = kopf.AiohttpSession(server=info.server, aiohttp_session=session)
        return sessions[info]

    async def probe(**_: Any) -> str:
        liveness.check()
        return "alive"

    async def cleanup(**_: Any) -> None:
        # kopf takes over the process's signal handlers, so this is how a SIGTERM shows.
        stop.set()

    kopf.on.cleanup(registry=handlers)(cleanup)
    # An ordinary error would be tried again after a minute, with everything, or the probe's request, left hanging.
    kopf.on.login(registry=handlers, errors=kopf.ErrorsMode.PERMANENT)(login)
    kopf.on.probe(registry=handlers, id="loop", errors=kopf.ErrorsMode.PERMANENT)(probe)
    return handlers


def _handler(
    put: Callable[..., set[Key]], drop: Callable[..., set[Key]], queue: WorkQueue
) -> Callable[..., Awaitable[None]]:
    async def handle(event: Any, **_: Any) -> None:
        body = event["object"]
        for key in drop(body) if event["type"] == "DELETED" else put(body):
            queue.add(key)

    return handle


async def watch(handlers: kopf.OperatorRegistry, scope: Scope, *, liveness_endpoint: str, stop: asyncio.Event) -> None:
    """Watches until `stop` is set or a watch fails for good, which ends the process: a restart is the recovery."""
    await kopf.operator(
        registry=handlers,
        settings=settings(),
        clusterwide=not scope.namespaces,
        namespaces=scope.namespaces,
        standalone=True,
        liveness_endpoint=liveness_endpoint,
        stop_flag=stop,
    )
