"""The servers of session pods over HTTP. A pod that does not answer is an ordinary result."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from everloop_operator.api import names
from everloop_operator.api.training_session import CheckpointsSpec
from everloop_operator.core.plan import Poll
from everloop_operator.core.report import TrainerReport

from . import asking

TIMEOUT_SECONDS = 2.0
"""For the whole answer: the image is the tenant's choice, and a trickle must not pass for silence."""


class TrainerClient:
    """Asks session pods for their status."""

    def __init__(self, port: int = names.TRAINER_PORT) -> None:
        self._port = port
        self._client = asking.session()

    async def answer(self, poll: Poll, token: str) -> TrainerReport:
        """The report of the pod that is to be asked. Raises Unanswered."""
        return await self.ask(poll.ip, token, snapshot=poll.snapshot, checkpoints=poll.checkpoints)

    async def ask(
        self, ip: str, token: str, *, snapshot: str = "", checkpoints: CheckpointsSpec | None = None
    ) -> TrainerReport:
        """The report of the server at this address. Raises Unanswered."""
        server = asking.origin(ip, self._port)
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if snapshot:
                    # An older trainer knows no such request: then the pod leaves without one at its deadline.
                    await self._tell("POST", f"{server}/snapshot", token, {"id": snapshot})
                if checkpoints:
                    # Whether it was taken over is in the report.
                    told = {"checkpoints": checkpoints.model_dump(mode="json", by_alias=True)}
                    await self._tell("PUT", f"{server}/settings", token, told)
                content = await asking.read(self._client, f"{server}/status", token)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise asking.unanswered(error) from None
        return asking.parse(TrainerReport, content)

    async def _tell(self, method: str, url: str, token: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with self._client.request(method, url, headers=headers, json=body, allow_redirects=False):
            pass

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()
