"""Who may enter: authentication, the pod that a call is meant for, and the server's own phase."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everloop_trainer.session.errors import Fenced, StorageFailed
from everloop_trainer.session.ports import Journal
from everloop_trainer.session.service import SessionService

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
OPERATOR_PATHS = frozenset({"/status", "/snapshot", "/settings"})
"""The operator dials the pod that it made, and names none."""
POD_UID_HEADER = "x-everloop-pod-uid"
MISDIRECTED = 421

_T = TypeVar("_T")
Ending = Fenced | StorageFailed | None
"""Why a server stops serving; None for an orderly shutdown."""


class Closed(Exception):
    """The server is not serving: not yet open, draining, or ended."""


class Gate:
    """The server's phase, shared between its requests and its life cycle: not open yet, open, ending.

    `ended` resolves once, with the first reason to end.
    """

    def __init__(self, token: str, pod_uid: str) -> None:
        self._token = token.encode()
        self._pod_uid = pod_uid
        self._service: SessionService | None = None
        self._opening: Journal | None = None
        self._failed = ""
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    def begin(self, journal: Journal) -> None:
        """The epoch is claimed; the journal's first record is being written."""
        self._opening = journal

    def fail(self, reason: str) -> None:
        """The storage could not be opened."""
        self._failed = reason

    def open(self, service: SessionService) -> None:
        """The journal is open and the epoch claimed: operations are accepted from now on."""
        self._service = service

    def end(self, reason: Ending) -> None:
        """Stop serving; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(reason)

    @property
    def ready(self) -> bool:
        """Whether operations are accepted."""
        return self._service is not None and not self.ended.done()

    @property
    def service(self) -> SessionService:
        """Raises Closed unless the server is open."""
        if self._service is None or self.ended.done():
            raise Closed
        return self._service

    def status(self) -> dict[str, Any]:
        """The body of `GET /status`; before the session is open it says at most what is wrong with the storage."""
        if self._service is not None:
            return self.service.status().to_json()
        if self.ended.done():
            raise Closed
        error = self._failed or (self._opening.trouble if self._opening is not None else "")
        return {"state": "Opening", "storage": {"error": error}}

    async def call(self, work: Awaitable[_T]) -> _T:
        """Awaits the session's work; what ends the session ends the server.

        Raises:
            Closed: the incarnation has ended.
        """
        try:
            return await work
        except (Fenced, StorageFailed) as reason:
            self.end(reason)
            raise Closed from reason

    async def poll(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Like `call` for work that changes nothing and may be given up: ends as soon as the server does."""
        task = asyncio.create_task(work)
        await asyncio.wait((task, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await self.call(task)
        task.cancel()
        raise Closed

    def closed_response(self) -> Response:
        """What callers are told while the server is not open; the gateway retries either."""
        if self.ended.done() and isinstance(self.ended.result(), Fenced):
            return JSONResponse({"detail": "superseded by a newer incarnation"}, MISDIRECTED)
        return JSONResponse({"detail": "not serving now"}, 503, headers={"Retry-After": "1"})

    def signing(self, send: Send) -> Send:
        """`send` with the pod's UID among the headers of the answer."""

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[POD_UID_HEADER] = self._pod_uid
            await send(message)

        return signed

    def refusal(self, path: str, headers: Headers) -> Response | None:
        """The answer to a call that may not enter, or None."""
        scheme, _, credential = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(credential.strip().encode(), self._token):
            return JSONResponse({"detail": "unauthorized"}, 401, headers={"WWW-Authenticate": "Bearer"})
        named = headers.get(POD_UID_HEADER)
        if named != self._pod_uid and not (named is None and path in OPERATOR_PATHS):
            return JSONResponse({"detail": f"{POD_UID_HEADER}: this is another pod"}, MISDIRECTED)
        if self.ended.done() or (self._service is None and path != "/status"):
            return self.closed_response()
        return None


class Guard:
    """ASGI middleware that lets nothing but health probes past the gate, and signs each answer with the pod's UID.

    A caller that dials an address which another workload has taken over tells its answer from ours by that.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a refused call, passes on any other."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            refusal = self._gate.refusal(scope["path"], Headers(scope=scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            await self._app(scope, receive, self._gate.signing(send))
            return
        await self._app(scope, receive, send)
