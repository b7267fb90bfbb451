"""What the operator knows at the moment of a scrape: of its queue, of sessions, jobs, pods and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from everloop_operator.api import names
from everloop_operator.core import node_health, node_rules
from everloop_operator.core.observed import Node, Pod
from everloop_operator.core.plan import Poll
from everloop_operator.core.report import MOST, TrainerReport

from .cache import Cache
from .kept import Summary
from .poller import Poller
from .ports import Key, Now
from .work_queue import WorkQueue

SESSION = ["namespace", "session"]
POD = [*SESSION, "pod"]
Reported = Sequence[tuple[Key, Pod, TrainerReport | None]]
"""Every session pod with the latest report of its server."""


class StateCollector(Collector):
    """Reads cache, queue and reports; makes no request."""

    def __init__(
        self, queue: WorkQueue, cache: Cache, poller: Poller[Poll, TrainerReport], now: Now, fleet_cap: float
    ) -> None:
        self._queue = queue
        self._cache = cache
        self._poller = poller
        self._now = now
        self._fleet_cap = fleet_cap

    def describe(self) -> list[Metric]:
        """Nothing: otherwise everything would be collected once at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Everything."""
        now, keys = self._now(), self._cache.keys()
        reported = [
            (key, item.pod, self._poller.answer(key, item.pod.uid).report)
            for key in keys
            if key.kind == names.TRAINING_SESSION_KIND
            for item in self._cache.pods(key)
        ]
        yield GaugeMetricFamily("everloop_queue_depth", "Objects that wait for a pass.", self._queue.depth())
        yield GaugeMetricFamily(
            "everloop_queue_oldest_seconds",
            "For how long the object that has waited longest for a pass has waited.",
            self._queue.oldest_wait(),
        )
        yield from objects(self._cache.summaries())
        yield from nodes(self._cache.nodes(), self._cache.hosting(), self._fleet_cap, now)
        yield from trainers(reported, now)


def objects(summaries: Mapping[Key, Summary]) -> Iterator[Metric]:
    """Sessions and jobs by phase, and those for which nothing will change by itself."""
    phases = Counter((key.kind, summary.phase) for key, summary in summaries.items())
    for name, kind, known in (
        ("everloop_sessions", names.TRAINING_SESSION_KIND, names.PHASES),
        ("everloop_jobs", names.RL_JOB_KIND, names.JOB_PHASES),
    ):
        family = GaugeMetricFamily(name, f"{kind}s by phase.", labels=["phase"])
        for phase in known:
            family.add_metric([phase], phases[kind, phase])
        yield family
    stalled = Counter((key.kind, summary.stalled) for key, summary in summaries.items() if summary.stalled)
    family = GaugeMetricFamily(
        "everloop_stalled", "Objects that need help, by kind and reason.", labels=["kind", "reason"]
    )
    for labels, count in stalled.items():
        family.add_metric(labels, count)
    yield family


def nodes(seen: Mapping[str, Node], hosting: Mapping[str, int], fleet_cap: float, now: datetime) -> Iterator[Metric]:
    """What the rules find at nodes, and what becomes of it."""
    counting = Counter(
        (signal.rule, signal.severity.value)
        for node in seen.values()
        for signal in node.signals
        if node_rules.counts(signal, now)
    )
    family = GaugeMetricFamily(
        "everloop_node_signals", "Nodes that show a signal now, by rule and severity.", labels=["rule", "severity"]
    )
    for labels, count in counting.items():
        family.add_metric(labels, count)
    yield family
    hosts = [seen[name] for name in hosting if name in seen]
    leaving = node_health.to_leave(hosts, now)
    held_back = leaving > node_health.most_to_leave(len(hosts), fleet_cap)
    yield GaugeMetricFamily(
        "everloop_nodes_to_leave", "Nodes with session pods that show signals to leave them.", leaving
    )
    yield GaugeMetricFamily(
        "everloop_node_moves_held_back",
        "Of these, nodes that are not left because so many show such signals.",
        leaving if held_back else 0,
    )


def trainers(reported: Reported, now: datetime) -> Iterator[Metric]:
    """What pods hold, and what their servers report."""
    held = CounterMetricFamily(
        "everloop_gpu_held_seconds", "GPUs of a session pod, times seconds since it got its node.", labels=POD
    )
    age = GaugeMetricFamily("everloop_snapshot_age_seconds", "Time since the newest snapshot of a session.", labels=POD)
    full = GaugeMetricFamily("everloop_storage_failing", "1 if the storage of a session takes no more.", labels=POD)
    mismatches = CounterMetricFamily(
        "everloop_replay_mismatches", "Operations whose result differed when they were computed again.", labels=POD
    )
    waiting = GaugeMetricFamily(
        "everloop_waiting_operations", "Operations of a session that were accepted and have no result yet.", labels=POD
    )
    for key, pod, report in reported:
        labels = [key.namespace, key.name, pod.name]
        if pod.scheduled and not pod.terminal:
            held.add_metric(labels, pod.gpus * max(0.0, (now - pod.scheduled).total_seconds()))
        if report is None:
            continue
        if report.last_snapshot_time:
            age.add_metric(labels, max(0.0, (now - datetime.fromisoformat(report.last_snapshot_time)).total_seconds()))
        full.add_metric(labels, 1 if report.storage.error else 0)
        mismatches.add_metric(labels, min(max(0, report.replay_mismatches), MOST))
        if report.waiting_operations is not None:
            waiting.add_metric(labels, report.waiting_operations)
    yield from (held, age, full, mismatches, waiting)
    yield from work([(key, pod, report) for key, pod, report in reported if report])


def work(reports: Sequence[tuple[Key, Pod, TrainerReport]]) -> Iterator[Metric]:
    """What servers have had computed. A server that restarts begins anew at 0."""
    operations = CounterMetricFamily(
        "everloop_operations", "Operations that ended, by kind and outcome.", labels=[*POD, "kind", "outcome"]
    )
    useful = CounterMetricFamily(
        "everloop_gpu_useful_seconds",
        "GPUs of a session pod, times seconds in operations that were computed for the first time and succeeded.",
        labels=POD,
    )
    replay = CounterMetricFamily(
        "everloop_replay_seconds", "Seconds in which models were brought back into an engine.", labels=POD
    )
    spent = CounterMetricFamily(
        "everloop_step_seconds",
        "Seconds of operations of models, by part: wait for the engine, forward, backward, optimizer, journal.",
        labels=[*POD, "part"],
    )
    tokens = CounterMetricFamily(
        "everloop_tokens",
        "Tokens that were computed, by model, key and kind: trained, scored, prompt, sampled.",
        labels=[*POD, "model", "key", "kind"],
    )
    for key, pod, report in reports:
        labels = [key.namespace, key.name, pod.name]
        for ended in report.work.operations:
            operations.add_metric([*labels, ended.kind, ended.outcome], ended.count)
        useful.add_metric(labels, pod.gpus * float(report.work.useful_seconds))
        replay.add_metric(labels, float(report.work.replay_seconds))
        if report.work.step_seconds is not None:
            for part, seconds in report.work.step_seconds:
                spent.add_metric([*labels, part], float(seconds))
        for counted in report.work.tokens:
            tokens.add_metric([*labels, counted.model, counted.key, counted.kind], counted.count)
    yield from (operations, useful, replay, spent, tokens)
