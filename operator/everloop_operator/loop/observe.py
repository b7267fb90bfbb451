"""A key -> all that a decision may rest on. Only this module knows what comes from the cache and what is read."""

from __future__ import annotations

from collections.abc import Mapping

from everloop_operator.core import children, claims
from everloop_operator.core.observed import Claim, Notice, Observed, Pod, Session
from everloop_operator.core.plan import Poll
from everloop_operator.core.projections import newest_notice, session_of
from everloop_operator.core.refusals import Refusal
from everloop_operator.core.report import TrainerReport

from .cache import Cache
from .claim_reader import ClaimReader
from .currency import look_up
from .poller import Poller
from .ports import Body, Cluster, ClusterError, Key, Now


class Observer:
    """Puts an observation together."""

    def __init__(self, cluster: Cluster, cache: Cache, poller: Poller[Poll, TrainerReport], now: Now) -> None:
        self._cluster = cluster
        self._cache = cache
        self._poller = poller
        self._now = now
        self._claims = ClaimReader(cluster, now)

    async def observe(self, key: Key, body: Body, refusal: Refusal | None) -> Observed:
        """The observation of the TrainingSession that was read as `body`. Raises ClusterError."""
        session = session_of(body)
        await self._verify(key, session)
        cached = self._cache.pods(key)
        own = tuple(item.pod for item in cached if item.owner == session.uid)
        current = max(own, key=lambda pod: pod.attempt, default=None)
        found = await self._read_claims(key, session, current)
        return Observed(
            now=self._now(),
            session=session,
            pods=own,
            taken_attempts=frozenset(item.pod.attempt for item in cached if item.owner != session.uid),
            nodes=self._cache.nodes(),
            nodes_watched=self._cache.nodes_watched,
            hosting=self._cache.hosting(),
            claims=found,
            notices=await self._read_notices(key, found, current),
            trainer=self._poller.answer(key, current.uid if current else ""),
            refusal=refusal,
        )

    async def _verify(self, key: Key, session: Session) -> None:
        """Reads live what the cache lacks, because a lack means a new attempt."""
        recorded = session.status.pod
        own = {item.pod.name for item in self._cache.pods(key) if item.owner == session.uid}
        due = recorded.name if recorded else _awaited(session)
        await look_up(self._cluster, self._cache, key, due if due not in own else "", recorded.node if recorded else "")

    async def _read_claims(self, key: Key, session: Session, current: Pod | None) -> dict[str, Claim | None]:
        found: dict[str, Claim | None] = {}
        for name in set(claims.wanted(session.name, session.spec).values()) if session.spec else ():
            try:
                found[name] = await self._claims.read(key, name, current)
            except ClusterError:
                continue  # claims only explain; a decision about attempts must not wait for one
        return found

    async def _read_notices(
        self, key: Key, found: Mapping[str, Claim | None], current: Pod | None
    ) -> dict[str, Notice]:
        """What the cluster says of claims that are not bound, and of a pod that has no containers yet."""
        subjects = [
            ("PersistentVolumeClaim", name) for name, claim in found.items() if claim and claim.phase == "Pending"
        ]
        if current and claims.waits_for_volumes(current):
            subjects.append(("Pod", current.name))
        notices: dict[str, Notice] = {}
        for kind, name in subjects:
            try:
                notice = newest_notice((await self._cluster.events_of(key.namespace, kind, name)).items)
            except ClusterError:
                continue  # as with claims: this only explains
            if notice:
                notices[f"{kind}/{name}"] = notice
        return notices


def _awaited(session: Session) -> str:
    """Name of the pod that was made by the last pass, and that the status does not have yet; '' for none."""
    status = session.status
    return children.pod_name(session.name, status.attempt) if status.attempt and not status.rest else ""
