"""The life of the server process: listen, open the session, serve, and drain or end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import structlog
import uvicorn

from everloop_http.resources import give_back_at_once
from everloop_http.slow_readers import SlowReaders, http_protocol
from everloop_trainer.config import GRACE_SECONDS
from everloop_trainer.server.app import build_app
from everloop_trainer.server.gate import Gate
from everloop_trainer.session.errors import Fenced, StorageFailed
from everloop_trainer.session.ports import Journal
from everloop_trainer.session.service import SessionService

DRAIN_SECONDS = 20.0
"""How long an orderly shutdown may take to finish the running operation and snapshot every model."""

END_SECONDS = 10.0
"""How long before the end of the pod's grace period the server is done: the rest of the pod has to end, too."""

TELL_SECONDS = 5.0
"""How long a server that cannot open its storage says why before it ends and another one tries."""
MOST_UNTAKEN_BYTES = 256 << 20
"""Of answers whose clients do not take them, beyond what the kernel holds."""

OpenSession = Callable[[Callable[[Journal], None]], Awaitable[SessionService]]

_log = structlog.get_logger(__name__)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: a signal drains the session first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    host: str,
    port: int,
    token: str,
    pod_uid: str,
    open_session: OpenSession,
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Serves until SIGTERM or SIGINT; returns 0 once the session is drained.

    `open_session` opens the storage and claims the epoch; it is given what to call with its journal meanwhile.
    After `grace_seconds` from the signal the pod is killed.

    Raises:
        OSError: the address cannot be bound.
        Fenced, StorageMismatch, StorageFailed: as `open_session` or the session says.
    """
    give_back_at_once()
    gate = Gate(token, pod_uid)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gate.end, None)
    config = uvicorn.Config(
        build_app(gate),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        http=http_protocol(SlowReaders(MOST_UNTAKEN_BYTES)),
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    http = _HttpServer(config)
    listener = listen(host, port)
    listening = asyncio.create_task(http.serve(sockets=[listener]))
    listening.add_done_callback(lambda _: gate.end(None))  # nobody can reach a session behind a server that ended
    _log.info("listening", host=host, port=port)
    try:
        return await _run_session(gate, open_session, grace_seconds)
    finally:
        http.should_exit = True
        await listening


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send what they have at once. Raises OSError if it cannot be bound.

    An answer leaves in two writes, head and body. With Nagle's algorithm (RFC 896) the second waits for the peer to
    acknowledge the first, which a peer puts off for 40 ms. asyncio turns it off only for sockets that name TCP as their
    protocol, which those of `socket.create_server` do not; on Linux connections inherit the option from here.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _run_session(gate: Gate, open_session: OpenSession, grace_seconds: float) -> int:
    try:
        opening = asyncio.ensure_future(open_session(gate.begin))
        await asyncio.wait((opening, gate.ended), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            return 0
        try:
            service = await opening
        except StorageFailed as failure:
            gate.fail(str(failure))
            await asyncio.wait((gate.ended,), timeout=TELL_SECONDS)
            raise
        gate.open(service)
        _log.info("session open", **service.status().to_json()["incarnation"])
        running = asyncio.create_task(service.run(), name="session")
        await asyncio.wait((running, gate.ended), return_when=asyncio.FIRST_COMPLETED)
        if gate.ended.done() and (reason := gate.ended.result()) is not None:
            running.cancel()
            raise reason
        if not running.done():
            _log.info("draining")
            await service.drain(DRAIN_SECONDS, grace_seconds - END_SECONDS)
        await running
        return 0
    except (Fenced, StorageFailed) as reason:
        gate.end(reason)
        raise
