"""`loop.ports.TrainerStatus` over HTTP. A pod that does not answer is an ordinary result."""

from __future__ import annotations

import asyncio

import httpx
from pydantic import ValidationError

from everloop_operator.api import names
from everloop_operator.core.report import TrainerReport
from everloop_operator.loop.ports import Unanswered

TIMEOUT_SECONDS = 2.0
"""For the whole answer: the image is the tenant's choice, and a trickle must not pass for silence."""
LARGEST_REPORT = 4 << 20


class TrainerClient:
    """Asks session pods for their status."""

    def __init__(self, port: int = names.TRAINER_PORT) -> None:
        self._port = port
        # Pods are dialled directly: no proxy. Redirects are not followed.
        self._client = httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False)

    async def ask(self, ip: str, token: str, *, snapshot: str = "") -> TrainerReport:
        """The report of the server at this address. Raises Unanswered."""
        host = f"[{ip}]" if ":" in ip else ip
        server = f"http://{host}:{self._port}"
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if snapshot:
                    # An older trainer knows no such request: then the pod leaves without one at its deadline.
                    headers = {"Authorization": f"Bearer {token}"}
                    await self._client.post(f"{server}/snapshot", headers=headers, json={"id": snapshot})
                content = await self._read(f"{server}/status", token)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:  # TimeoutError is an OSError
            raise Unanswered(type(error).__name__) from None
        try:
            return TrainerReport.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise Unanswered(f"the report can't be read: {place}: {first['msg']}") from None

    async def _read(self, url: str, token: str) -> bytes:
        # Not compressed: a small answer must not become a large one here.
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        async with self._client.stream("GET", url, headers=headers) as answer:
            if answer.status_code != 200:
                raise Unanswered(f"HTTP {answer.status_code}")
            content = bytearray()
            async for chunk in answer.aiter_raw():
                content += chunk
                if len(content) > LARGEST_REPORT:
                    raise Unanswered("the report is too large")
            return bytes(content)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()
