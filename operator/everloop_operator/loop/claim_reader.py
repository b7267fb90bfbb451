"""Reading claims: each is read once for all the sessions that share it, and believed for a while."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import structlog

from everloop_operator.core.observed import Claim, Pod, Volume
from everloop_operator.core.projections import claim_of, volume_of

from .ports import Absent, Cluster, ClusterError, Key, Now, Refused

BOUND_SECONDS = 240.0
"""How long a bound claim is believed to be bound.

Less than a resync is away, which so reads it again; more than an operator that starts over many sessions needs until it
has heard from all their pods.
"""
UNBOUND_SECONDS = 5.0
PLACED_SECONDS = 5.0
"""How much later than a pod was placed, by the API server's clock, a claim must have been read to be the pod's own."""

log = structlog.get_logger()

Placement = tuple[str, str] | None
"""UID of the newest pod, and its node."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A claim, or that there is none."""

    claim: Claim | None
    time: datetime

    def fresh(self, now: datetime) -> bool:
        settled = self.claim is not None and self.claim.phase == "Bound" and not self.claim.deleting
        return now < self.time + timedelta(seconds=BOUND_SECONDS if settled else UNBOUND_SECONDS)


class ClaimReader:
    """Remembers what was read, and for which pod."""

    def __init__(self, cluster: Cluster, now: Now) -> None:
        self._cluster = cluster
        self._now = now
        self._own: dict[tuple[Key, str], tuple[Placement, _Read]] = {}
        self._shared: dict[tuple[str, str], _Read] = {}
        self._reading: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._volumes: dict[str, Volume] = {}
        self._may_read_volumes = True

    async def read(self, key: Key, name: str, current: Pod | None) -> Claim | None:
        """The claim with which the current pod of a session is placed, or None. Raises ClusterError."""
        placement = (current.uid, current.node) if current else None
        known = self._own.get((key, name))
        # A claim outlives the pods that are placed with it, but between two of them another may take its name.
        if known and placement == known[0] and known[1].fresh(self._now()):
            return known[1].claim
        place = (key.namespace, name)
        async with self._reading[place]:
            shared = self._shared.get(place)
            moved = known is not None and placement != known[0]
            if shared is None or moved or not shared.fresh(self._now()) or not _after(shared.time, current):
                shared = self._shared[place] = _Read(await self._find(*place), self._now())
        self._own[key, name] = (placement, shared)
        return shared.claim

    async def _find(self, namespace: str, name: str) -> Claim | None:
        try:
            claim = claim_of(await self._cluster.claim(namespace, name))
        except Absent:
            return None
        if claim.phase != "Bound" or not claim.volume_name:
            return claim
        if claim.volume_name not in self._volumes and self._may_read_volumes:
            try:
                self._volumes[claim.volume_name] = volume_of(await self._cluster.volume(claim.volume_name))
            except Refused as error:
                # Rights on what belongs to no namespace are optional; asking again would change nothing.
                self._may_read_volumes = False
                log.warning("volumes can not be read: how they are shared is taken from the claims", problem=str(error))
            except ClusterError:
                return claim
        return replace(claim, volume=self._volumes.get(claim.volume_name))


def _after(time: datetime, current: Pod | None) -> bool:
    """Whether a claim that another session's pass read then is surely the one that this pod was placed with."""
    return current is not None and time > (current.scheduled or current.created) + timedelta(seconds=PLACED_SECONDS)
