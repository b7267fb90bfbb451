"""Following resources: list, then watch from there, for ever; what is known stays known while the API is away."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from everloop_gateway.kube import ApiRefused, ApiUnavailable, Kube

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0

log = structlog.get_logger(__name__)


class Sink(Protocol):
    """Where the objects of one list go."""

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """These are all there are."""

    def upsert(self, resource: dict[str, Any]) -> None:
        """This one is new or changed."""

    def remove(self, resource: dict[str, Any]) -> None:
        """This one is gone."""


class _Expired(Exception):
    """The resource version is too old to go on from: list again."""


@dataclass
class Follower:
    """Keeps one sink equal to one list of the API server."""

    kube: Kube
    path: str
    sink: Sink
    selectors: dict[str, str] = field(default_factory=dict)
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the first list is in, and never cleared."""

    async def run(self) -> None:
        """Follow for ever."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                version = await self._list()
                pause = FIRST_PAUSE_SECONDS
                await self._watch(version)
            except _Expired:
                log.info("watch expired, listing again", path=self.path)
            except ApiUnavailable as error:
                log.warning("API server unavailable, going on with what is known", path=self.path, error=str(error))
            except ApiRefused as error:
                # Most often a missing rule; it is repeated, since rules may arrive after us.
                log.error("API server refuses to list or watch", path=self.path, status=error.status, error=str(error))
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _list(self) -> str:
        objects, version = await self.kube.list(self.path, self.selectors)
        self.sink.replace(objects)
        if not self.synced.is_set():
            log.info("first list is in", path=self.path, objects=len(objects))
            self.synced.set()
        return version

    async def _watch(self, version: str) -> None:
        while True:
            try:
                async for event in self.kube.watch(self.path, self.selectors, version):
                    version = self._apply(event)
            except ApiRefused as error:
                if error.status == 410:
                    raise _Expired from error
                raise

    def _apply(self, event: dict[str, Any]) -> str:
        kind, resource = event["type"], event["object"]
        if kind == "ERROR":
            if resource.get("code") == 410:
                raise _Expired
            raise ApiUnavailable(str(resource.get("message")))
        if kind == "DELETED":
            self.sink.remove(resource)
        elif kind in ("ADDED", "MODIFIED"):
            self.sink.upsert(resource)
        version: str = resource["metadata"]["resourceVersion"]
        return version
