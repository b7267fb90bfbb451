"""The life of the server process: listen, open the session, serve, drain, and say by the exit code why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import structlog
import uvicorn

from everloop_trainer import exitcodes
from everloop_trainer.server.app import build_app
from everloop_trainer.server.gate import Ending, Gate
from everloop_trainer.session.errors import Fenced, StorageFailed, StorageMismatch
from everloop_trainer.session.service import SessionService

DRAIN_SECONDS = 20.0
"""How long an orderly shutdown may take to finish the running operation and snapshot every model."""

_CODES: dict[Ending, int] = {"fenced": exitcodes.FENCED, "storage_failed": exitcodes.STORAGE_FAILED, "draining": 0}
_log = structlog.get_logger(__name__)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: a signal drains the session first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    host: str, port: int, token: str, pod_uid: str, open_session: Callable[[], Awaitable[SessionService]]
) -> int:
    """Serves until the incarnation ends or SIGTERM or SIGINT arrives; returns the process's exit code.

    `open_session` opens the storage and claims the epoch; it may raise Fenced, StorageMismatch or StorageFailed.

    Raises:
        OSError: the address cannot be bound.
        StorageMismatch: from `open_session`; no restart can help.
    """
    gate = Gate(token, pod_uid)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gate.end, "draining")
    config = uvicorn.Config(
        build_app(gate),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    http = _HttpServer(config)
    listening = asyncio.create_task(http.serve(sockets=[socket.create_server((host, port), backlog=2048)]))
    _log.info("listening", host=host, port=port)
    try:
        return await _run_session(gate, open_session)
    finally:
        http.should_exit = True
        await listening


async def _run_session(gate: Gate, open_session: Callable[[], Awaitable[SessionService]]) -> int:
    try:
        opening = asyncio.ensure_future(open_session())
        await asyncio.wait((opening, gate.ended), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            return 0
        service = await opening
        gate.open(service)
        _log.info("session open", **service.status().to_json()["incarnation"])
        running = asyncio.create_task(service.run(), name="session")
        await asyncio.wait((running, gate.ended), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
            raise RuntimeError("the session's run ended without a reason")
        if gate.ended.result() == "draining":
            _log.info("draining")
            await service.drain(DRAIN_SECONDS)
            await running
            _log.info("drained")
        running.cancel()
    except Fenced as error:
        _log.error("fenced", error=str(error))
        gate.end("fenced")
    except StorageMismatch:
        gate.end("draining")
        raise
    except StorageFailed as error:
        _log.error("storage failed", error=str(error))
        gate.end("storage_failed")
    return _CODES[gate.ended.result()]
