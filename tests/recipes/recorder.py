"""What stands between gateway and session pod in these tests, and keeps what was asked and what was answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.networks import new_address
from tests.server.in_thread import served
from tests.server.pod import Pod

OWN = frozenset({"host", "content-length", "connection", "transfer-encoding"})
"""Headers that belong to one connection."""
PORT = 8080


@dataclass(frozen=True)
class Call:
    """A submit that the pod has accepted: the last part of its path, its headers and body, and what it is called."""

    name: str
    headers: dict[str, str]
    body: bytes
    request_id: str


@dataclass
class Recording:
    """All submits, each once, in the order of their acceptance; and the last answer of each poll, by request id."""

    ip: str
    calls: list[Call] = field(default_factory=list)
    results: dict[str, httpx.Response] = field(default_factory=dict)
    accepted: Callable[[Call], None] = lambda _: None
    """Told of each submit before its client is."""

    def clear(self) -> None:
        """Begin anew."""
        self.calls.clear()
        self.results.clear()

    def keep(self, name: str, headers: dict[str, str], body: bytes, answer: httpx.Response) -> None:
        if name == "retrieve_future":
            self.results[json.loads(body)["request_id"]] = answer
            return
        request_id = _request_id(answer)
        if request_id is not None and all(call.request_id != request_id for call in self.calls):
            call = Call(name, headers, body, request_id)
            self.calls.append(call)
            self.accepted(call)


def _request_id(answer: httpx.Response) -> str | None:
    if answer.status_code != 200 or "json" not in answer.headers.get("content-type", ""):
        return None
    content: Any = answer.json()
    return content.get("request_id") if isinstance(content, dict) else None


@contextlib.contextmanager
def recording(pod: Pod) -> Iterator[Recording]:
    """Serves what stands before `pod` until the block ends; a pod that does not answer is a 503, as of a proxy."""
    recording = Recording(new_address())
    client = httpx.AsyncClient(timeout=httpx.Timeout(60, connect=1), limits=httpx.Limits(max_connections=None))

    async def forward(request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in OWN}
        url = pod.url + request.url.path
        try:
            answer = await client.request(
                request.method, url, content=body, headers=headers, params=request.query_params
            )
        except httpx.TransportError:
            return Response(status_code=503)
        recording.keep(request.url.path.rpartition("/")[2], headers, body, answer)
        kept = {name: value for name, value in answer.headers.items() if name not in OWN}
        return Response(answer.content, answer.status_code, headers=kept)

    app = Starlette(routes=[Route("/{rest:path}", forward, methods=["GET", "POST", "PUT", "DELETE"])])
    with served(app, recording.ip, PORT, client):
        yield recording
