"""The operator process: `python -m everloop_operator`. The only place that puts the parts together."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TypeVar

import structlog

from everloop_metrics.endpoint import listening
from everloop_operator.api import names, tokens
from everloop_operator.cluster import kube, progress, trainer, watch
from everloop_operator.cluster.unlisted import Unlisted
from everloop_operator.core.jobs.observed import heard
from everloop_operator.core.jobs.plan import JobSettings, ProgressPoll
from everloop_operator.core.jobs.report import ProgressReport
from everloop_operator.core.node_rules import DRAIN
from everloop_operator.core.observed import answered
from everloop_operator.core.plan import Poll, Settings
from everloop_operator.core.report import TrainerReport
from everloop_operator.loop import metrics
from everloop_operator.loop.cache import Cache
from everloop_operator.loop.execute import Executor
from everloop_operator.loop.job_execute import JobCredentials, JobExecutor
from everloop_operator.loop.job_pass import JobPass
from everloop_operator.loop.lateness import Lateness
from everloop_operator.loop.liveness import Liveness
from everloop_operator.loop.observe import Observer
from everloop_operator.loop.poller import Poller
from everloop_operator.loop.ports import Absent, ClusterError, Refused
from everloop_operator.loop.read_only import ReadOnlyPass
from everloop_operator.loop.resync import Resync
from everloop_operator.loop.session_pass import SessionPass
from everloop_operator.loop.state_metrics import StateCollector
from everloop_operator.loop.statuses import StatusWriter
from everloop_operator.loop.work_queue import WorkQueue
from everloop_operator.loop.worker import Pass, Worker

from .settings import OperatorSettings, SettingsError, read

LIVENESS_PORT = 8081
RETRY_SECONDS = 2.0
SCHEMA_SECONDS = 5.0
"""How often schemas that are too old are looked at again."""

T = TypeVar("T")

log = structlog.get_logger()


def now() -> datetime:
    """The clock."""
    return datetime.now(UTC)


class Stopped(Exception):
    """The process was told to end before it had started."""


async def operate(settings: OperatorSettings, stop: asyncio.Event) -> None:
    """Runs until `stop` is set. Raises ClusterError when the cluster is not fit for it, and what ends a watch."""
    cluster = kube.Kube(await kube.load_configuration(), settings.release_namespace, settings.scope)
    trainers, readers = trainer.TrainerClient(), progress.ProgressClient()
    queue, cache = WorkQueue(), Cache(now, settings.node_rules, nodes_watched=settings.scope.nodes)
    lateness = Lateness()
    poller = Poller(trainers.answer, queue.add, now, lateness, answered)
    progress_poller = Poller(readers.ask, queue.add, now, lateness, heard)
    try:
        master = await _patiently(lambda: _master_key(cluster), stop)
        statuses = StatusWriter(cluster, cache, queue.add)
        sessions = _session_pass(cluster, cache, statuses, poller, master, settings)
        jobs = _job_pass(cluster, cache, statuses, progress_poller, queue, master, settings)
        passes: dict[str, Pass] = {
            names.TRAINING_SESSION_KIND: sessions.reconcile,
            names.RL_JOB_KIND: jobs.reconcile,
        }
        outdated = await _patiently(cluster.lacking, stop)
        for kind, missing in outdated.items():
            passes[kind] = ReadOnlyPass(cluster, cache, kind, missing, now).reconcile
        worker = Worker(queue, passes)
        resync = Resync(cluster, cache, queue)
        alive = Liveness(queue, resync)
        unlisted = Unlisted(watch.lists(settings.scope), resync.soon)
        handlers = watch.registry(cache, queue, alive, stop, settings.scope, unlisted)
        endpoint = f"http://{settings.pod_ip}:{LIVENESS_PORT}/healthz"
        watching = asyncio.create_task(watch.watch(handlers, settings.scope, liveness_endpoint=endpoint, stop=stop))
        own: list[asyncio.Task[None]] = []
        try:
            # Lists that are read once the watches have begun, and before the first pass: it misses nothing then. A
            # session whose pod is not known yet would look lost.
            await _begun(unlisted, watching)
            await _patiently(resync.once, stop)
            log.info("started", objects=len(cache.keys()), nodes=len(cache.nodes()))
            running = [worker.run(), resync.run(), alive.run(), lateness.run(), _until(stop)]
            if outdated:
                running.append(_until_current(cluster))
            own += [asyncio.create_task(task) for task in running]
            collector = StateCollector(queue, cache, poller, now, settings.fleet_cap)
            async with _metrics_port(cluster, collector, master, settings, stop):
                done, _ = await asyncio.wait([watching, *own], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Ours go first: kopf waits for whatever else runs in its loop.
            for task in own:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)
            await poller.close()
            await progress_poller.close()
            stop.set()
            await asyncio.gather(watching, return_exceptions=True)
        for task in done:
            task.result()
    finally:
        queue.close()
        await poller.close()
        await progress_poller.close()
        await trainers.close()
        await readers.close()
        await cluster.close()


def _session_pass(
    cluster: kube.Kube,
    cache: Cache,
    statuses: StatusWriter,
    poller: Poller[Poll, TrainerReport],
    master: bytes,
    settings: OperatorSettings,
) -> SessionPass:
    def token(uid: str, attempt: int) -> str:
        return tokens.session_token(master, uid, attempt)

    plan_settings = Settings(
        settings.trainer_image, settings.gateway_endpoint, settings.node_lost_seconds, settings.fleet_cap
    )
    observer = Observer(cluster, cache, poller, now)
    executor = Executor(cluster, cache, statuses, token, now)
    return SessionPass(cache, observer, executor, poller, token, plan_settings)


def _job_pass(
    cluster: kube.Kube,
    cache: Cache,
    statuses: StatusWriter,
    poller: Poller[ProgressPoll, ProgressReport],
    queue: WorkQueue,
    master: bytes,
    settings: OperatorSettings,
) -> JobPass:
    credentials = JobCredentials(
        token=functools.partial(tokens.progress_token, master),
        key=functools.partial(tokens.job_key, master),
        key_id=functools.partial(tokens.job_key_id, master),
        release_namespace=settings.release_namespace,
    )
    plan_settings = JobSettings(settings.operator_image, settings.gateway_endpoint, settings.node_lost_seconds)
    executor = JobExecutor(cluster, cache, statuses, credentials, queue.add, now)
    return JobPass(cluster, cache, executor, poller, credentials, plan_settings, now)


@asynccontextmanager
async def _metrics_port(
    cluster: kube.Kube, collector: StateCollector, master: bytes, settings: OperatorSettings, stop: asyncio.Event
) -> AsyncIterator[None]:
    if not settings.metrics:
        yield
        return
    token = tokens.metrics_token(master)
    await _patiently(lambda: cluster.publish_metrics_token(token), stop)
    metrics.know(rule.name for rule in (*settings.node_rules, DRAIN))
    metrics.REGISTRY.register(collector)
    async with listening(metrics.REGISTRY, settings.pod_ip, names.METRICS_PORT, lambda: token):
        yield


async def _master_key(cluster: kube.Kube) -> bytes:
    await cluster.self_check()
    return await cluster.master_key()


async def _patiently(read: Callable[[], Awaitable[T]], stop: asyncio.Event) -> T:
    """Repeats `read` while the API server is away: a process that ended would wait for the kubelet's back-off too.

    Raises:
        Refused, Absent: a right or the CRD is missing.
        Stopped: `stop` was set meanwhile.
    """
    while not stop.is_set():
        try:
            return await read()
        except (Absent, Refused):
            raise
        except ClusterError as error:
            log.warning("waiting for the API server", problem=str(error))
        try:
            await asyncio.wait_for(stop.wait(), RETRY_SECONDS)
        except TimeoutError:
            continue
    raise Stopped


async def _begun(unlisted: Unlisted, watching: asyncio.Task[None]) -> None:
    """Until every watch has its beginning. Raises Stopped, and what ends a watch."""
    begun = asyncio.create_task(unlisted.begun.wait())
    await asyncio.wait([begun, watching], return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    if watching.done():
        watching.result()
        raise Stopped


async def _until_current(cluster: kube.Kube) -> None:
    """Until the CustomResourceDefinitions have every field: then this process ends, and the next one does its work."""
    while True:
        await asyncio.sleep(SCHEMA_SECONDS)
        try:
            if not await cluster.lacking():
                log.info("the CustomResourceDefinitions have been updated")
                return
        except ClusterError as error:
            log.warning("the served schemas can't be read", problem=str(error))


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


async def _main(settings: OperatorSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)  # until kopf takes them over
    await operate(settings, stop)


def configure_logging() -> None:
    """JSON lines on stderr; of the libraries only what needs attention."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")


def spare_the_collector() -> None:
    """Lets Python's cyclic collector look less often at a memory of lasting objects, which lists fill rapidly.

    With the defaults it takes a third of the CPU time of a start over 10,000 sessions.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def main() -> int:
    """The command."""
    configure_logging()
    spare_the_collector()
    try:
        asyncio.run(_main(read(os.environ)))
    except Stopped:
        log.info("stopped before the API server could be reached")
    except (SettingsError, ClusterError, ValueError) as error:
        log.error("cannot run", problem=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
