"""The pass: take a key, observe, plan, execute, and say when to look again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from everloop_operator.core.observed import Refusal
from everloop_operator.core.plan import Settings, plan

from .cache import Cache
from .execute import Executor, Token
from .observe import Observer
from .poller import Poller
from .ports import ClusterError, Key
from .work_queue import WorkQueue

log = structlog.get_logger()

CONCURRENT_PASSES = 16


class Worker:
    """Runs passes, several at a time but one at a time for a key."""

    def __init__(
        self,
        queue: WorkQueue,
        cache: Cache,
        observer: Observer,
        executor: Executor,
        poller: Poller,
        token: Token,
        settings: Settings,
    ) -> None:
        self._queue = queue
        self._cache = cache
        self._observer = observer
        self._executor = executor
        self._poller = poller
        self._token = token
        self._settings = settings

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT_PASSES):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            try:
                wait = await self.reconcile(key)
            except ClusterError as error:
                delay = self._queue.failed(key)
                log.warning("retry", namespace=key.namespace, session=key.name, problem=str(error), seconds=delay)
                continue
            except Exception:
                delay = self._queue.failed(key)
                log.exception("defect", namespace=key.namespace, session=key.name, seconds=delay)
                continue
            self._queue.schedule(key, wait)
            self._queue.done(key)

    async def reconcile(self, key: Key) -> float | None:
        """One pass. Returns seconds after which the next is due without a signal, or None."""
        body = self._cache.session(key)
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
