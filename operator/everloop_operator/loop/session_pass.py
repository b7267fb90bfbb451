"""The pass over a TrainingSession: observe, plan, execute, and say when to look again."""

from __future__ import annotations

from dataclasses import replace

from everloop_operator.core.plan import Poll, Settings, plan
from everloop_operator.core.refusals import Refusal
from everloop_operator.core.report import TrainerReport

from .cache import Cache
from .execute import Executor, Token
from .observe import Observer
from .poller import Poller
from .ports import ClusterError, Key


class SessionPass:
    """Puts the parts of a pass together."""

    def __init__(
        self,
        cache: Cache,
        observer: Observer,
        executor: Executor,
        poller: Poller[Poll, TrainerReport],
        token: Token,
        settings: Settings,
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._executor = executor
        self._poller = poller
        self._token = token
        self._settings = settings

    async def reconcile(self, key: Key) -> float | None:
        """One pass. Returns seconds after which the next is due without a signal, or None."""
        body = self._cache.get(key)
        if body is None:
            self._poller.want(key, None)
            self._executor.forget(key)
            return None
        observed = await self._observer.observe(key, body, self._executor.refusal(key))
        todo = plan(observed, self._settings)
        try:
            put_off = await self._executor.execute(key, body, observed, todo)
        except ClusterError as error:
            if todo.create_pod:
                # A session without a pod must not pass for serving until one can be made (a webhook that is down).
                refusal = Refusal(str(error)[:900], observed.now, observed.session.generation, transient=True)
                await self._executor.tell_failure(
                    key, body, observed, plan(replace(observed, refusal=refusal), self._settings)
                )
            raise
        token = self._token(observed.session.uid, todo.poll.attempt) if todo.poll else ""
        self._poller.want(key, todo.poll, token)
        waits = [wait for wait in (todo.requeue_after, put_off) if wait is not None]
        return min(waits, default=None)
