"""Carries out a plan: children, deletions, one status write, then events. What fails is repeated by the next pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from everloop_operator.api import names
from everloop_operator.core import children, status
from everloop_operator.core.events import Event
from everloop_operator.core.observed import Observed
from everloop_operator.core.plan import Plan
from everloop_operator.core.refusals import Refusal

from .cache import Cache
from .currency import is_current
from .ports import Body, Cluster, ClusterError, Key, Now, Refused
from .refusals import Refusals
from .statuses import StatusWriter

log = structlog.get_logger()

Token = Callable[[str, int], str]
"""(UID of the TrainingSession, attempt) -> the token of that attempt."""


class Executor:
    """Remembers only what saves requests: which secrets and disruption budgets it has applied."""

    def __init__(self, cluster: Cluster, cache: Cache, statuses: StatusWriter, token: Token, now: Now) -> None:
        self._cluster = cluster
        self._cache = cache
        self._statuses = statuses
        self._token = token
        self._now = now
        self._applied: dict[Key, tuple[str, int]] = {}
        self._budgets: dict[Key, str] = {}
        self._refusals = Refusals(now)
        self._refused_budgets = Refusals(now)

    def refusal(self, key: Key) -> Refusal | None:
        """Why the last pod of this session was refused, while that still holds."""
        return self._refusals.get(key)

    def forget(self, key: Key) -> None:
        """The session is gone."""
        for memory in (self._applied, self._budgets):
            memory.pop(key, None)
        self._refusals.clear(key)
        self._refused_budgets.clear(key)
        self._statuses.forget(key)

    async def execute(self, key: Key, body: Body, observed: Observed, plan: Plan) -> float | None:
        """Acts. Returns seconds after which a status write that was put off is due, or None.

        A refused child ends the pass: the refusal is remembered for the next observation, which is due at once if a pod
        was to be made, because the status that was to be is another one then.

        Raises:
            ClusterError: a request failed; nothing after it was done.
        """
        if plan.finalizers is not None:
            changed = await self._cluster.set_finalizers(body, plan.finalizers)
            if observed.session.deleting:
                await self._tell(key, body, plan.events)
                return None  # with its last finalizer it is gone
            self._cache.put(changed)
            return 0.0  # what follows needs the version that there is now
        if plan.needs_current and not await is_current(self._cluster, self._cache, body):
            return 0.0
        try:
            await self._children(key, observed, plan)
        except Refused as error:
            log.warning("refused", namespace=key.namespace, session=key.name, problem=str(error))
            refusal = self._refusals.add(key, error, observed.session.generation)
            if plan.create_pod is not None:
                return 0.0
            # No pod was to be made: the next pass would ask for the same again.
            await self._status(key, body, observed, plan)
            return refusal.patience_seconds
        refused = await self._disruption_budget(key, observed, plan)
        for deletion in plan.delete_pods:
            await self._cluster.delete_pod(key.namespace, deletion.name, uid=deletion.uid, force=deletion.force)
        for attempt in plan.stale_tokens:
            name = children.secret_name(key.name, attempt)
            await self._cluster.delete_owned_secret(key.namespace, name, owner=observed.session.uid)
        delay = await self._status(key, body, observed, plan)
        if plan.delete_session:
            await self._cluster.delete_session(key.namespace, key.name, uid=observed.session.uid)
        await self._tell(key, body, (*plan.events, *refused))
        return delay

    async def _tell(self, key: Key, body: Body, events: Sequence[Event]) -> None:
        try:
            for event in events:
                await self._cluster.post_event(body, event, self._now())
        except ClusterError as error:
            # The status says it all; a story that could not be told is no reason to act again.
            log.warning("event not posted", namespace=key.namespace, session=key.name, problem=str(error))

    async def tell_failure(self, key: Key, body: Body, observed: Observed, plan: Plan) -> None:
        """Writes the status, and no more, of a pass whose pod could not be made. Raises ClusterError."""
        await self._status(key, body, observed, plan)

    async def _children(self, key: Key, observed: Observed, plan: Plan) -> None:
        session = observed.session
        if plan.token_attempt and self._applied.get(key) != (session.uid, plan.token_attempt):
            token = self._token(session.uid, plan.token_attempt)
            await self._cluster.apply(children.token_secret(session, plan.token_attempt, token))
            self._applied[key] = (session.uid, plan.token_attempt)
        if plan.create_claim is not None:
            await self._cluster.create_claim(plan.create_claim)
        if plan.create_pod is not None:
            pod = await self._cluster.apply(plan.create_pod)
            self._refusals.clear(key)
            self._cache.put_pod(pod)

    async def _disruption_budget(self, key: Key, observed: Observed, plan: Plan) -> tuple[Event, ...]:
        """Returns what is to be told: without one a session is drained like any other, and goes on."""
        if plan.disruption_budget is None:
            return ()
        owner = plan.disruption_budget["metadata"]["ownerReferences"][0]["uid"]
        before = self._refused_budgets.get(key)
        waits = before is not None and (self._now() - before.time).total_seconds() < before.patience_seconds
        if waits or self._budgets.get(key) == owner:
            return ()
        try:
            await self._cluster.apply(plan.disruption_budget)
        except Refused as error:
            log.warning("refused", namespace=key.namespace, session=key.name, problem=str(error))
            self._refused_budgets.add(key, error, observed.session.generation)
            return (Event("Warning", names.EVENT_CHILD_REFUSED, str(error), owner),)
        self._refused_budgets.clear(key)
        self._budgets[key] = owner
        return ()

    async def _status(self, key: Key, body: Body, observed: Observed, plan: Plan) -> float | None:
        before, after = observed.session.status, plan.status
        if after is None or (after == before and body.get("status") is not None):
            return None
        urgent = status.urgent(before, after)
        return await self._statuses.write(key, body, status.dump(before), status.dump(after), urgent=urgent)
