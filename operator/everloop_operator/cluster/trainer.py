"""`loop.ports.TrainerStatus` over HTTP. A pod that does not answer is an ordinary result."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from everloop_operator.api import names
from everloop_operator.core.report import TrainerReport
from everloop_operator.loop.ports import Unanswered

TIMEOUT_SECONDS = 2.0
LARGEST_REPORT = 4 << 20


class TrainerClient:
    """Asks session pods for their status."""

    def __init__(self, port: int = names.TRAINER_PORT) -> None:
        self._port = port
        # Pods are dialled directly: no proxy. Redirects are not followed.
        self._client = httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False)

    async def ask(self, ip: str, token: str) -> TrainerReport:
        """The report of the server at this address. Raises Unanswered."""
        host = f"[{ip}]" if ":" in ip else ip
        try:
            answer = await self._client.get(
                f"http://{host}:{self._port}/status", headers={"Authorization": f"Bearer {token}"}
            )
        except (httpx.HTTPError, OSError) as error:
            raise Unanswered(type(error).__name__) from None
        if answer.status_code != 200:
            raise Unanswered(f"HTTP {answer.status_code}")
        if len(answer.content) > LARGEST_REPORT:
            raise Unanswered("the report is too large")
        try:
            return TrainerReport.model_validate_json(answer.content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise Unanswered(f"the report can't be read: {place}: {first['msg']}") from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()
