"""Which TrainingSession holds a model that has no binding, because the claim that owned it was deleted.

What a binding says of a model is in the storage, too. Where a storage came back under another claim, from copies or by
hand, the session pods of the namespace are asked.
"""

from __future__ import annotations

import asyncio

import structlog

from everloop_gateway import wire
from everloop_gateway.cluster import Cluster
from everloop_gateway.holding import Kind
from everloop_gateway.ids import Stream
from everloop_gateway.keys import Principal
from everloop_gateway.routing import Binding, Gone, SessionView
from everloop_gateway.upstream import Call, Progress, Upstream
from everloop_operator.api import names

log = structlog.get_logger(__name__)


class Holders:
    """Asks session pods for models."""

    def __init__(self, cluster: Cluster, upstream: Upstream) -> None:
        self._cluster = cluster
        self._upstream = upstream

    async def find(self, principal: Principal, model: Stream, progress: Progress) -> Binding | None:
        """A binding, not written yet, to the session that has a model of this key; None if none has it.

        Waits for pods that are being replaced until one has it. Raises ApiRefused.
        """
        views = [view for view in self._cluster.sessions.in_namespace(principal.namespace) if may_have_runs(view)]
        asking = [asyncio.ensure_future(self._holds(view, principal, model, progress)) for view in views]
        try:
            for asked in asyncio.as_completed(asking):
                view = await asked
                if view is not None:
                    log.info("model found again in storage", model=model.id, session=view.title)
                    return view.bind(model.id, principal, None)
            return None
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _holds(
        self, view: SessionView, principal: Principal, model: Stream, progress: Progress
    ) -> SessionView | None:
        """The session as it is once its pod has answered, if it has the model."""
        asked = view.bind(view.title, principal, None)
        answer = await self._upstream.deliver(asked, get(f"training_runs/{model.id}"), progress)
        if isinstance(answer, Gone) or answer.status != 200:
            return None
        return self._cluster.sessions.get((view.namespace, view.name))


def may_have_runs(view: SessionView) -> bool:
    """A session without a pod that none is being made for would be waited for in vain."""
    if view.deleting:
        return False
    coming = view.phase in (names.PHASE_STARTING, names.PHASE_RECOVERING) or (view.idle and not view.refuses)
    if view.incarnation is None and not coming:
        log.info("left out of a listing: it has no pod", session=view.title, phase=view.phase)
        return False
    return True


def get(path: str) -> Call:
    """The call that reads this."""
    return Call(Kind.QUERY, f"{wire.PREFIX}/{path}", b"", wire.JSON, wire.JSON, method="GET")
