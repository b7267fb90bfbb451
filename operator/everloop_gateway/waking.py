"""Telling the operator that an idle TrainingSession is needed again."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import structlog

from everloop_gateway.kube import ApiRefused, ApiUnavailable
from everloop_gateway.state import SessionKey

REPEAT_SECONDS = 5.0
"""How long a wake may stay without effect before it is repeated: it was lost, or met the rest before this one."""

log = structlog.get_logger(__name__)


class Waker:
    """One request for all calls that wait for a session, repeated while it stays idle."""

    def __init__(
        self, wake: Callable[[str, str, str], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wake = wake
        self._clock = clock
        self._told: dict[str, float] = {}

    async def wake(self, key: SessionKey, uid: str) -> None:
        """Ask for a pod of the session with this UID; a failure is logged, and tried again by whoever waits on."""
        now = self._clock()
        self._told = {each: told for each, told in self._told.items() if now - told < REPEAT_SECONDS}
        if uid in self._told:
            return
        self._told[uid] = now
        try:
            await self._wake(*key, uid)
        except (ApiUnavailable, ApiRefused) as error:
            log.warning("session not woken", namespace=key[0], session=key[1], error=str(error))
        else:
            log.info("session woken by a call", namespace=key[0], session=key[1])
