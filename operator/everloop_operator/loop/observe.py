"""A key -> all that a decision may rest on. Only this module knows what comes from the cache and what is read."""

from __future__ import annotations

from datetime import datetime, timedelta

from everloop_operator.core.health import claims
from everloop_operator.core.observed import Claim, Observed, Refusal, Session
from everloop_operator.core.projections import claim_of, session_of

from .cache import Cache
from .poller import Poller
from .ports import Absent, Body, Cluster, ClusterError, Key, Now

BOUND_SECONDS = 60.0
"""How long a bound claim is believed to be bound."""
UNBOUND_SECONDS = 5.0

Placement = tuple[str, str] | None
"""UID of the newest pod, and its node."""


class Observer:
    """Puts an observation together."""

    def __init__(self, cluster: Cluster, cache: Cache, poller: Poller, now: Now) -> None:
        self._cluster = cluster
        self._cache = cache
        self._poller = poller
        self._now = now
        self._claims: dict[tuple[Key, str], tuple[datetime, Placement, Claim | None]] = {}

    async def observe(self, key: Key, body: Body, refusal: Refusal | None) -> Observed:
        """The observation of the TrainingSession that was read as `body`. Raises ClusterError."""
        session = session_of(body)
        await self._verify(key, session)
        cached = self._cache.pods(key)
        own = tuple(item.pod for item in cached if item.owner == session.uid)
        current = max(own, key=lambda pod: pod.attempt, default=None)
        return Observed(
            now=self._now(),
            session=session,
            pods=own,
            taken_attempts=frozenset(item.pod.attempt for item in cached if item.owner != session.uid),
            nodes=self._cache.nodes(),
            hosting=self._cache.hosting(),
            claims=await self._read_claims(key, session, (current.uid, current.node) if current else None),
            trainer=self._poller.trainer(key, current.uid if current else ""),
            refusal=refusal,
        )

    async def _verify(self, key: Key, session: Session) -> None:
        """Reads live what the cache lacks, because a lack means a new attempt."""
        recorded = session.status.pod
        own = {item.pod.name for item in self._cache.pods(key) if item.owner == session.uid}
        if recorded and recorded.name not in own:
            try:
                self._cache.put_pod(await self._cluster.pod(key.namespace, recorded.name))
            except Absent:
                pass
        wanted = {item.pod.node for item in self._cache.pods(key) if item.pod.node}
        if recorded and recorded.node:
            wanted.add(recorded.node)
        for name in wanted - self._cache.nodes().keys():
            try:
                self._cache.put_node(await self._cluster.node(name))
            except Absent:
                continue

    async def _read_claims(self, key: Key, session: Session, placement: Placement) -> dict[str, Claim | None]:
        if session.spec is None:
            return {}
        found: dict[str, Claim | None] = {}
        for name in set(claims(session.spec).values()):
            known = self._claims.get((key, name))
            # A claim outlives the pods that are placed with it, but between two of them another may take its name.
            if known and self._now() < known[0] and placement == known[1]:
                found[name] = known[2]
                continue
            try:
                claim: Claim | None = claim_of(await self._cluster.claim(session.namespace, name))
            except Absent:
                claim = None
            except ClusterError:
                # Claims only explain; a decision about attempts must not wait for one.
                continue
            bound = claim is not None and claim.phase == "Bound"
            until = self._now() + timedelta(seconds=BOUND_SECONDS if bound else UNBOUND_SECONDS)
            self._claims[key, name] = (until, placement, claim)
            found[name] = claim
        return found
