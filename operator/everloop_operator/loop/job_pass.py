"""The pass over an RLJob: observe, plan, execute, and say when to look again."""

from __future__ import annotations

from dataclasses import replace

from everloop_operator.core.jobs import children
from everloop_operator.core.jobs.observed import Driver, Job, ObservedJob
from everloop_operator.core.jobs.plan import JobSettings, ProgressPoll, plan
from everloop_operator.core.jobs.projections import job_of, seen_session
from everloop_operator.core.jobs.report import ProgressReport
from everloop_operator.core.refusals import Refusal

from .cache import Cache, session_of_job
from .currency import look_up
from .job_execute import JobCredentials, JobExecutor
from .poller import Poller
from .ports import Body, Cluster, ClusterError, Key, Now


class JobPass:
    """Puts the parts of a pass together."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        executor: JobExecutor,
        poller: Poller[ProgressPoll, ProgressReport],
        credentials: JobCredentials,
        settings: JobSettings,
        now: Now,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._executor = executor
        self._poller = poller
        self._credentials = credentials
        self._settings = settings
        self._now = now

    async def reconcile(self, key: Key) -> float | None:
        """One pass. Returns seconds after which the next is due without a signal, or None."""
        body, gone = self._cache.get(key), self._cache.gone(key)
        if body is None:
            self._poller.want(key, None)
            await self._executor.forget(key, gone)
        else:
            await self._executor.revoke(gone)
        self._cache.settled(key, gone)
        if body is None:
            return None
        observed = await self._observe(key, body)
        todo = plan(observed, self._settings)
        try:
            put_off = await self._executor.execute(key, body, observed, todo)
        except ClusterError as error:
            if todo.create_pod:
                # A job without a driver must not pass for running until one can be made (a webhook that is down).
                refusal = Refusal(str(error)[:900], observed.now, observed.job.generation, transient=True)
                told = plan(replace(observed, refusal=refusal), self._settings)
                await self._executor.tell(key, body, observed, told)
            raise
        token = self._credentials.token(observed.job.uid, todo.poll.attempt) if todo.poll else ""
        self._poller.want(key, todo.poll, token)
        waits = [wait for wait in (todo.requeue_after, put_off) if wait is not None]
        return min(waits, default=None)

    async def _observe(self, key: Key, body: Body) -> ObservedJob:
        job = job_of(body)
        await self._verify(key, job)
        cached = self._cache.pods(key)
        session = self._cache.get(session_of_job(body))
        own = tuple(item.driver for item in cached if item.driver and item.owner == job.uid)
        return ObservedJob(
            now=self._now(),
            job=job,
            drivers=own,
            taken_attempts=frozenset(item.pod.attempt for item in cached if item.owner != job.uid),
            nodes=self._cache.nodes(),
            nodes_watched=self._cache.nodes_watched,
            session=seen_session(session) if session else None,
            progress=self._poller.answer(key, _latest_uid(job, own)),
            refusal=self._executor.refusal(key),
        )

    async def _verify(self, key: Key, job: Job) -> None:
        """Reads live what the cache lacks, because a lack means a new attempt."""
        recorded = job.status.pod
        own = {item.pod.name for item in self._cache.pods(key) if item.owner == job.uid}
        due = recorded.name if recorded else _awaited(job)
        await look_up(self._cluster, self._cache, key, due if due not in own else "", recorded.node if recorded else "")


def _awaited(job: Job) -> str:
    """Name of the driver that was made by the last pass, and that the status does not have yet; '' for none."""
    attempt, over = job.status.attempt, job.status.finish_time or (job.spec and job.spec.suspend)
    return children.pod_name(job.name, attempt) if attempt and not over else ""


def _latest_uid(job: Job, drivers: tuple[Driver, ...]) -> str:
    """UID of the pod of the latest attempt, though it may be gone."""
    latest = max(drivers, key=lambda driver: driver.pod.attempt, default=None)
    if latest and latest.pod.attempt >= job.status.attempt:
        return latest.pod.uid
    return job.status.pod.uid if job.status.pod else ""
