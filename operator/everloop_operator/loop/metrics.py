"""What the operator counts of its own work. What it knows of the cluster's state is in `state_metrics`.

The instruments are the process's: a restart begins anew at 0, as Prometheus' `rate` and `increase` expect.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from everloop_operator.api import names
from everloop_operator.core.interruptions import Interruptions

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

RECONCILE_SECONDS = Histogram(
    "everloop_reconcile_seconds",
    "Duration of passes over an object, by its kind and how they ended: done, retry or defect.",
    ["kind", "outcome"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0),
    registry=REGISTRY,
)
API_REQUESTS = Counter(
    "everloop_api_requests",
    "Requests to the API server besides watches, by HTTP verb and status code; error: no answer.",
    ["verb", "code"],
    registry=REGISTRY,
)
RECOVERIES = Counter(
    "everloop_recoveries",
    "Interruptions of sessions and jobs, by kind and reason.",
    ["kind", "reason"],
    registry=REGISTRY,
)
RECOVERY_SECONDS = Histogram(
    "everloop_recovery_seconds",
    "From the detection of an interruption until the object goes on, by kind.",
    ["kind"],
    buckets=(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 900.0, 3600.0),
    registry=REGISTRY,
)
NODE_MOVES = Counter(
    "everloop_node_moves", "Sessions that left a node for its health, by rule.", ["rule"], registry=REGISTRY
)
REPLAYED = Counter(
    "everloop_replayed_operations", "Operations that were computed once more in recoveries.", registry=REGISTRY
)
UNHEARD = Counter(
    "everloop_unheard_answers",
    "Questions to pods that no answer was heard to while the operator itself was short of CPU; they count for nothing.",
    registry=REGISTRY,
)
LOST = Counter("everloop_lost_operations", "Operations that a recovery could not bring back.", registry=REGISTRY)

# From 0 on, so that the first of each is an increase.
for _kind in (names.TRAINING_SESSION_KIND, names.RL_JOB_KIND):
    RECOVERY_SECONDS.labels(_kind)
    for _reason in names.RECOVERY_REASONS:
        RECOVERIES.labels(_kind, _reason)


def know(rules: Iterable[str]) -> None:
    """These are the names of the rules by which nodes are left."""
    for rule in rules:
        NODE_MOVES.labels(rule)


def count(kind: str, interruptions: Interruptions) -> None:
    """A status with these interruptions was written."""
    for entry in interruptions.begun:
        RECOVERIES.labels(kind, entry.reason).inc()
        if entry.rule:
            NODE_MOVES.labels(entry.rule).inc()
    for entry in interruptions.ended:
        RECOVERY_SECONDS.labels(kind).observe(entry.seconds)
        REPLAYED.inc(entry.replayed)
        LOST.inc(entry.lost)
