"""Carries out a plan for an RLJob. What fails is repeated by the next pass."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import structlog

from everloop_operator.api import names
from everloop_operator.core.events import Event
from everloop_operator.core.jobs import children, status
from everloop_operator.core.jobs.observed import Job, ObservedJob
from everloop_operator.core.jobs.plan import JobPlan
from everloop_operator.core.refusals import PATIENCE_SECONDS, Refusal

from .cache import Cache
from .currency import is_current
from .ports import Body, Cluster, ClusterError, Key, Now, Refused
from .refusals import Refusals
from .statuses import StatusWriter

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class JobCredentials:
    """What is derived from the master key for each job: nothing is stored."""

    token: Callable[[str, int], str]
    """(UID of the RLJob, attempt) -> the token of the progress reader."""
    key: Callable[[str, int], str]
    """(UID of the RLJob, attempt) -> the API key of the driver."""
    key_id: Callable[[str], str]
    """UID of the RLJob -> the public part of its key."""
    release_namespace: str
    """Where the gateway looks for API keys."""


class JobExecutor:
    """Remembers only what saves requests: which credentials it has applied or removed."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        statuses: StatusWriter,
        credentials: JobCredentials,
        wake: Callable[[Key], None],
        now: Now,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._statuses = statuses
        self._wake = wake
        self._credentials = credentials
        self._now = now
        self._uids: dict[Key, str] = {}
        self._applied: dict[str, int] = {}
        self._removed: dict[str, set[int]] = {}
        self._refusals = Refusals(now)

    def refusal(self, key: Key) -> Refusal | None:
        """Why the last pod of this job was refused, while that still holds."""
        return self._refusals.get(key)

    async def forget(self, key: Key, gone: Set[str]) -> None:
        """The job is gone: its key goes too, and those of jobs before it. Raises ClusterError; then call it again."""
        await self.revoke({*gone, *filter(None, [self._uids.get(key)])})
        self._uids.pop(key, None)
        self._refusals.clear(key)
        self._statuses.forget(key)

    async def revoke(self, uids: Set[str]) -> None:
        """Delete the API keys of jobs that are gone. Raises ClusterError."""
        for uid in uids:
            await self._revoke(uid)
            self._applied.pop(uid, None)
            self._removed.pop(uid, None)

    async def execute(self, key: Key, body: Body, observed: ObservedJob, plan: JobPlan) -> float | None:
        """Acts. Returns seconds after which what was put off or refused is due, or None.

        A refused pod or session ends the pass: the refusal is remembered for the next observation, due at once.

        Raises:
            ClusterError: a request failed; nothing after it was done.
        """
        job = observed.job
        if self._uids.get(key, job.uid) != job.uid:
            await self.forget(key, frozenset())  # another job has taken the name
        self._uids[key] = job.uid
        if plan.needs_current and not await is_current(self._cluster, self._cache, body):
            return 0.0
        try:
            if plan.apply_session is not None:
                # The watch will show nothing new: the session's own pass is asked for here.
                for other in self._cache.put(await self._cluster.apply(plan.apply_session)):
                    self._wake(other)
            if plan.create_pod is not None:
                # Before the key: once this pod exists, no other driver's key is to be the valid one.
                self._cache.put_pod(await self._cluster.apply(plan.create_pod))
                self._refusals.clear(key)
        except Refused as error:
            log.warning("refused", namespace=key.namespace, job=key.name, problem=str(error))
            self._refusals.add(key, error, job.generation)
            return 0.0
        refused = await self._keys(job, plan)
        for deletion in plan.delete_pods:
            await self._cluster.delete_pod(key.namespace, deletion.name, uid=deletion.uid, force=deletion.force)
        if plan.delete_session:
            await self._cluster.delete_session(key.namespace, job.session_name, uid=plan.delete_session)
        await self._remove_secrets(job, plan)
        delay = await self.tell(key, body, observed, plan)
        try:
            for event in (*plan.events, *refused):
                await self._cluster.post_event(body, event, self._now())
        except ClusterError as error:
            # The status says it all; a story that could not be told is no reason to act again.
            log.warning("event not posted", namespace=key.namespace, job=key.name, problem=str(error))
        if refused:
            return PATIENCE_SECONDS if delay is None else min(delay, PATIENCE_SECONDS)
        return delay

    async def _keys(self, job: Job, plan: JobPlan) -> tuple[Event, ...]:
        """Returns what is to be told: without its secret a driver does not start, and everything else goes on."""
        attempt = plan.credentials
        if attempt is None:
            if not plan.keep_key and self._applied.get(job.uid) != 0:
                await self._revoke(job.uid)
            return ()
        if self._applied.get(job.uid) == attempt:
            return ()
        assert job.spec is not None
        derived = self._credentials
        key = derived.key(job.uid, attempt)
        # The gateway's half first: the driver can't start before the other one is there.
        await self._cluster.apply(children.key_secret(job, job.spec, key, derived.release_namespace))
        try:
            await self._cluster.apply(children.driver_secret(job, attempt, derived.token(job.uid, attempt), key))
        except Refused as error:
            log.warning("refused", namespace=job.namespace, job=job.name, problem=str(error))
            return (Event("Warning", names.EVENT_CHILD_REFUSED, str(error), f"{attempt}"),)
        self._applied[job.uid] = attempt
        return ()

    async def _revoke(self, uid: str) -> None:
        name = children.key_secret_name(self._credentials.key_id(uid))
        await self._cluster.delete_secret(self._credentials.release_namespace, name)
        self._applied[uid] = 0

    async def _remove_secrets(self, job: Job, plan: JobPlan) -> None:
        removed = self._removed.setdefault(job.uid, set())
        for attempt in plan.stale_secrets:
            if attempt not in removed:
                name = children.secret_name(job.name, attempt)
                await self._cluster.delete_owned_secret(job.namespace, name, owner=job.uid)
                removed.add(attempt)

    async def tell(self, key: Key, body: Body, observed: ObservedJob, plan: JobPlan) -> float | None:
        """Writes the status and no more; returns as `execute` does. Raises ClusterError."""
        before, after = observed.job.status, plan.status
        if after is None:
            return None
        urgent = status.urgent(before, after)
        return await self._statuses.write(key, body, status.dump(before), status.dump(after), urgent=urgent)
