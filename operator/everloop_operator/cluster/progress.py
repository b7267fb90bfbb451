"""The progress readers of driver pods over HTTP. One that does not answer is an ordinary result."""

from __future__ import annotations

import asyncio
from urllib.parse import urlencode

import aiohttp

from everloop_operator.api import names
from everloop_operator.api.rl_job import GoalSpec
from everloop_operator.core.jobs.plan import ProgressPoll
from everloop_operator.core.jobs.report import ProgressReport

from . import asking

TIMEOUT_SECONDS = 3.0
"""For the whole answer."""


class ProgressClient:
    """Asks progress readers for their reports."""

    def __init__(self, port: int = names.PROGRESS_PORT) -> None:
        self._port = port
        self._client = asking.session()

    async def ask(self, poll: ProgressPoll, token: str) -> ProgressReport:
        """The report of this pod's reader, with what it says of the goal. Raises Unanswered."""
        url = f"{asking.origin(poll.ip, self._port)}/report{_question(poll.goal)}"
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                content = await asking.read(self._client, url, token)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise asking.unanswered(error) from None
        return asking.parse(ProgressReport, content)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def _question(goal: GoalSpec | None) -> str:
    if goal is None:
        return ""
    fields = {
        "metric": goal.metric,
        "value": goal.value,
        "direction": goal.direction,
        "consecutive": goal.consecutive,
    }
    return f"?{urlencode(fields)}"
