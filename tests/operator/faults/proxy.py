"""A proxy before the API server that spoils single calls of the operator, and remembers all of them."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import aiohttp
from aiohttp import web

from tests.operator.control_plane import ControlPlane
from tests.operator.world import RELEASE

DELAY_SECONDS = 2.0
RETRY_AFTER_SECONDS = 1
WRITES = ("POST", "PUT", "PATCH", "DELETE")
_NAMESPACED = re.compile(r"/namespaces/([^/]+)(/.*)?$")


class Fault(StrEnum):
    """What happens to a call."""

    DELAY = "answered late"
    DUPLICATE = "executed twice"
    CONFLICT = "409"
    GONE = "410"
    BUSY = "429 with Retry-After"
    ERROR = "500"
    RESET_BEFORE = "reset, not executed"
    RESET_AFTER = "reset, executed"
    STALL_BEFORE = "never answered, not executed"
    STALL_AFTER = "never answered, executed"
    KILL_AFTER = "executed, and the operator is killed"


ANSWERS = {Fault.CONFLICT: 409, Fault.GONE: 410, Fault.BUSY: 429, Fault.ERROR: 500}
STALLS = (Fault.STALL_BEFORE, Fault.STALL_AFTER)
AFTER = (Fault.DELAY, Fault.RESET_AFTER, Fault.STALL_AFTER, Fault.KILL_AFTER)


@dataclass(frozen=True, order=True)
class Call:
    """A call as it would be in another run too: the namespace is left out."""

    method: str
    path: str
    occurrence: int
    """How many calls of this method and path there were before in its namespace, 0 for the first."""

    @property
    def writes(self) -> bool:
        return self.method in WRITES

    def __str__(self) -> str:
        return f"{self.method} {self.path} ({self.occurrence})"


class Proxy:
    """Plain HTTP on a port of 127.0.0.1, in a thread of its own."""

    def __init__(self, plane: ControlPlane) -> None:
        self.kill: Callable[[], None] = lambda: None
        """What KILL_AFTER calls."""
        self.hit: set[str] = set()
        """The namespaces whose fault has happened; "" for what belongs to none."""
        self.calls: dict[str, list[Call]] = {}
        self.altered: list[str] = []
        """Statuses that were written and not kept as they were."""
        self._plane = plane
        self._faults: dict[str, tuple[Call, Fault]] = {}
        self._homes: dict[str, str] = {}
        self._watches: set[web.StreamResponse] = set()
        self._deaf: set[web.StreamResponse] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._ready.wait()
        self.address = f"http://127.0.0.1:{self._port}"

    def spoil(self, namespace: str, call: Call, fault: Fault) -> None:
        """This call of this namespace will meet this fault."""
        self._faults[namespace] = (call, fault)

    def writes(self, namespace: str) -> list[Call]:
        return [call for call in self.calls.get(namespace, []) if call.writes]

    def deafen(self) -> None:
        """Nothing that happens from now on is shown by a watch that there is."""
        self._deaf = set(self._watches)

    def expire(self) -> None:
        """Tells deaf watches that they can't go on from where they were."""
        asyncio.run_coroutine_threadsafe(self._expire(), self._loop).result()

    async def _expire(self) -> None:
        status = {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired"}
        line = json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
        for stream in self._deaf & self._watches:
            await stream.write(line)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        trusted = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(self._plane.ca_file)), limit=0)
        async with aiohttp.ClientSession(connector=trusted, auto_decompress=False) as self._upstream:
            app = web.Application(client_max_size=1 << 24)
            app.router.add_route("*", "/{path:.*}", self._handle)
            # Whoever goes away ends its own call, so that a stall ends with it.
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._port = int(runner.addresses[0][1])
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        namespace, path = self._place(request, body)
        known = self.calls.setdefault(namespace, [])
        same = sum((call.method, call.path) == (request.method, path) for call in known)
        call = Call(request.method, path, same)
        known.append(call)
        wanted, fault = self._faults.get(namespace, (None, None))
        if call != wanted or fault is None:
            return await self._forward(request, body)
        self.hit.add(namespace)
        return await self._spoiled(request, body, fault)

    def _place(self, request: web.Request, body: bytes) -> tuple[str, str]:
        """The namespace that a call is for, and its path without that."""
        path = request.path + ("?watch" if "watch" in request.query else "")
        found = _NAMESPACED.search(path)
        if not found:
            return "", path
        namespace, rest = found.group(1), path[: found.start()] + (found.group(2) or "")
        if namespace != RELEASE:
            return namespace, rest
        name = path.rpartition("/")[2]
        if name.startswith("key-"):
            # An API key lies in the release's namespace, and is of another one.
            if body and request.method == "PATCH":
                self._homes[name] = base64.b64decode(json.loads(body)["data"]["namespace"]).decode()
            return self._homes.get(name, ""), "/release/key"
        return "", path

    async def _spoiled(self, request: web.Request, body: bytes, fault: Fault) -> web.StreamResponse:
        if fault in ANSWERS:
            status = {"kind": "Status", "status": "Failure", "code": ANSWERS[fault], "message": f"{fault}, injected"}
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if fault == Fault.BUSY else {}
            return web.json_response(status, status=ANSWERS[fault], headers=headers)
        if fault == Fault.DUPLICATE:
            await self._execute(request, body)
            return await self._forward(request, body)
        answer = await self._execute(request, body) if fault in AFTER else None
        if fault == Fault.DELAY:
            await asyncio.sleep(DELAY_SECONDS)
            assert answer
            return answer
        if fault == Fault.KILL_AFTER:
            self.kill()
        if fault in STALLS:
            await asyncio.Event().wait()
        assert request.transport
        request.transport.abort()
        return web.Response(status=500)

    async def _execute(self, request: web.Request, body: bytes) -> web.Response:
        if "watch" in request.query:
            return web.Response()  # nothing to execute
        async with self._send(request, body) as answer:
            content = await answer.read()
            if request.method == "PUT" and request.path.endswith("/status") and answer.status == 200:
                wanted, kept = (json.loads(text)["status"] for text in (body, content))
                self.altered += [f"{request.path}: {wanted} became {kept}"] if kept != wanted else []
            return web.Response(body=content, status=answer.status, headers=_headers(answer))

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if "watch" not in request.query:
            return await self._execute(request, body)
        async with self._send(request, body) as answer:
            stream = web.StreamResponse(status=answer.status, headers=_headers(answer))
            await stream.prepare(request)
            self._watches.add(stream)
            try:
                async for chunk in answer.content.iter_any():
                    if stream not in self._deaf:
                        await stream.write(chunk)
            finally:
                self._watches.discard(stream)
                if answer.connection is not None and answer.connection.transport is not None:
                    answer.connection.transport.abort()  # a polite end of TLS would outlast the loop
            return stream

    def _send(self, request: web.Request, body: bytes) -> aiohttp.client._RequestContextManager:
        kept = ("Authorization", "Accept", "Content-Type")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        return self._upstream.request(
            request.method,
            self._plane.server + request.path_qs,
            data=body or None,
            headers={**headers, "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None),
        )


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {"Content-Type": answer.headers.get("Content-Type", "application/json")}
