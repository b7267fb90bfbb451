"""The least that stands between the SDK and one session pod: answers what only a gateway knows, passes on the rest.

It holds a call while the pod is away, as the gateway does (by plain retries; the tests' outages are short).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from everloop_losses import identity
from tests.server import tinymodel
from tests.server.in_thread import served
from tests.server.pod import Pod

HOLD_SECONDS = 55.0
RETRIED = frozenset({421, 429, 502, 503, 504})


class Stub:
    """Routes of the stub; `sessions` counts create_session, `submits` records (path, status, seconds) of each call."""

    def __init__(self, pod: Pod, client_config: dict[str, Any]) -> None:
        self.pod = pod
        self.client_config = client_config
        self.url = ""
        self.sessions = 0
        self.samplers: dict[str, str | None] = {}
        self.submits: list[tuple[str, int, float]] = []
        self.losing: dict[str, Callable[[], None]] = {}
        """By path: what happens when the next answer comes, which is lost."""
        self.client = httpx.AsyncClient(timeout=httpx.Timeout(60, connect=1), limits=httpx.Limits(max_connections=None))
        self.app = Starlette(
            routes=[
                Route("/api/v1/client/config", self._config, methods=["POST"]),
                Route("/api/v1/client/dynamic_config", self._dynamic_config, methods=["POST"]),
                Route("/api/v1/create_session", self._create_session, methods=["POST"]),
                Route("/api/v1/session_heartbeat", self._empty, methods=["POST"]),
                Route("/api/v1/telemetry", self._telemetry, methods=["POST"]),
                Route("/api/v1/sessions/{id}/finish", self._empty, methods=["POST"]),
                Route("/api/v1/create_sampling_session", self._create_sampling_session, methods=["POST"]),
                Route("/api/v1/samplers/{id}", self._sampler),
                Route("/api/v1/create_custom_loss", self._create_custom_loss, methods=["POST"]),
                Route("/api/v1/{rest:path}", self._forward, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    async def _config(self, request: Request) -> Response:
        return JSONResponse(self.client_config)

    async def _dynamic_config(self, request: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def _empty(self, request: Request) -> Response:
        return JSONResponse({})

    async def _telemetry(self, request: Request) -> Response:
        return JSONResponse({"status": "accepted"})

    async def _create_session(self, request: Request) -> Response:
        self.sessions += 1
        return JSONResponse({"session_id": f"s-{time.time_ns():016x}-{self.sessions:016x}"})

    async def _create_sampling_session(self, request: Request) -> Response:
        body = await request.json()
        sampler = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        self.samplers[sampler] = body.get("model_path")
        return JSONResponse({"sampling_session_id": sampler})

    async def _create_custom_loss(self, request: Request) -> Response:
        body = await request.json()
        return JSONResponse({"request_id": identity.loss_id(body["session_id"], body)})

    async def _sampler(self, request: Request) -> Response:
        sampler = request.path_params["id"]
        answer = {"sampler_id": sampler, "base_model": tinymodel.NAME, "model_path": self.samplers.get(sampler)}
        return JSONResponse({key: value for key, value in answer.items() if value is not None})

    async def _forward(self, request: Request) -> Response:
        path = f"/api/v1/{request.path_params['rest']}"
        kept = {"content-type", "content-encoding", "accept", "x-idempotency-key"}
        headers = {name: value for name, value in request.headers.items() if name in kept}
        headers["X-Everloop-Stand-Ins"] = "true"
        body = await request.body()
        if path.endswith("/retrieve_future") and identity.session_of((await request.json())["request_id"]):
            return JSONResponse({"loss_id": (await request.json())["request_id"]})
        if path.endswith("/asample"):
            sampler = (await request.json())["sampling_session_id"]
            if sampler in self.samplers:
                headers["X-Everloop-Weights"] = self.samplers[sampler] or "base"
        if path.endswith("/load_weights"):
            headers["X-Everloop-Weights"] = (await request.json())["path"]
        if path.endswith("/copy_weights"):
            asked = await request.json()
            headers["X-Everloop-Weights"] = asked["source_path"]
            if asked.get("session_id") is None:  # a session of its own, which a repeat gives too
                name = hashlib.sha256(f"{asked['source_path']} {headers['x-idempotency-key']}".encode()).hexdigest()
                body = json.dumps({**asked, "session_id": f"s-{name[:16]}-{name[16:32]}", "model_seq_id": 0}).encode()
        give_up = time.monotonic() + HOLD_SECONDS
        while True:
            begun = time.monotonic()
            try:
                pod = self.pod
                url = pod.url + path
                answer = await self.client.request(request.method, url, content=body, headers=headers | pod.headers)
                if (accident := self.losing.pop(path, None)) is not None:
                    await asyncio.to_thread(accident)
                    answer = httpx.Response(503)
            except httpx.TransportError:
                answer = httpx.Response(503)
            self.submits.append((path, answer.status_code, time.monotonic() - begun))
            if answer.status_code not in RETRIED or time.monotonic() > give_up:
                passed = {"content-type": answer.headers.get("content-type", "application/json")}
                return Response(answer.content, answer.status_code, headers=passed)
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def serving(pod: Pod, ip: str, client_config: dict[str, Any]) -> Iterator[Stub]:
    """Serves a stub for `pod` on `ip`:8000 until the block ends."""
    stub = Stub(pod, client_config)
    stub.url = f"http://{ip}:8000"
    with served(stub.app, ip, 8000, stub.client):
        yield stub
