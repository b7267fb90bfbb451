"""The servers of session pods over HTTP. A pod that does not answer is an ordinary result."""

from __future__ import annotations

import asyncio

import aiohttp

from everloop_operator.api import names
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
        return await self.ask(poll.ip, token, snapshot=poll.snapshot)

    async def ask(self, ip: str, token: str, *, snapshot: str = "") -> TrainerReport:
        """The report of the server at this address. Raises Unanswered."""
        server = asking.origin(ip, self._port)
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if snapshot:
                    # An older trainer knows no such request: then the pod leaves without one at its deadline.
                    headers = {"Authorization": f"Bearer {token}"}
                    request = {"id": snapshot}
                    url = f"{server}/snapshot"
                    async with self._client.post(url, headers=headers, json=request, allow_redirects=False):
                        pass
                content = await asking.read(self._client, f"{server}/status", token)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise asking.unanswered(error) from None
        return asking.parse(TrainerReport, content)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()
