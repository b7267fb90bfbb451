"""The alerts. Each has a section of its name in docs/runbooks.md."""

from __future__ import annotations

from dataclasses import dataclass

WANTED = "SpecChanged|Resumed|NewerCheckpoint|AvoidanceLifted"
"""Reasons of recoveries that are no trouble."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule of Prometheus."""

    name: str
    expression: str
    lasts: str
    """For how long the expression must hold."""
    summary: str
    critical: bool = False


ALERTS = (
    Alert(
        "EverloopOperatorAbsent",
        "absent(everloop_queue_depth)",
        "5m",
        "No operator is scraped: nothing recovers sessions whose pod is lost.",
        critical=True,
    ),
    Alert(
        "EverloopGatewayAbsent",
        "absent(everloop_gateway_calls)",
        "5m",
        "No gateway is scraped: training loops may find nobody to call.",
        critical=True,
    ),
    Alert(
        "EverloopOperationsLost",
        "sum(increase(everloop_lost_operations_total[1h])) > 0",
        "0m",
        "A recovery lost acknowledged operations.",
        critical=True,
    ),
    Alert(
        "EverloopReplayDiffers",
        "max by (namespace, session) (everloop_replay_mismatches_total) > 0",
        "0m",
        "Operations of {{ $labels.namespace }}/{{ $labels.session }} had another result when they were computed again.",
    ),
    Alert(
        "EverloopStalled",
        "sum by (kind, reason) (everloop_stalled) > 0",
        "5m",
        "{{ $value }} objects of kind {{ $labels.kind }} need help: {{ $labels.reason }}.",
    ),
    Alert(
        "EverloopRecoveryTakesLong",
        'sum(min_over_time(everloop_sessions{phase=~"Recovering|Moving"}[15m])) > 0',
        "0m",
        "For 15 minutes there have been sessions that recover or move.",
    ),
    Alert(
        "EverloopManyRecoveries",
        f'sum by (reason) (increase(everloop_recoveries_total{{reason!~"{WANTED}"}}[1h])) > 10',
        "0m",
        "{{ $value }} recoveries within an hour: {{ $labels.reason }}.",
    ),
    Alert(
        "EverloopStorageFailing",
        "max by (namespace, session) (everloop_storage_failing) > 0",
        "2m",
        "The storage of {{ $labels.namespace }}/{{ $labels.session }} takes no more; its calls wait.",
        critical=True,
    ),
    Alert(
        "EverloopMovesHeldBack",
        "sum(everloop_node_moves_held_back) > 0",
        "5m",
        "{{ $value }} nodes show signals to leave them, more than nodeHealth.fleetCapPercent allows.",
    ),
    Alert(
        "EverloopPassesFail",
        'sum(rate(everloop_reconcile_seconds_count{outcome!="done"}[10m])) '
        "/ sum(rate(everloop_reconcile_seconds_count[10m])) > 0.5",
        "10m",
        "More than half of the operator's passes fail.",
    ),
    Alert(
        "EverloopDefect",
        'sum by (kind) (increase(everloop_reconcile_seconds_count{outcome="defect"}[10m])) > 0',
        "0m",
        "A pass over an object of kind {{ $labels.kind }} ended with a defect of the operator.",
    ),
    Alert(
        "EverloopQueueStuck",
        "max(everloop_queue_oldest_seconds) > 60",
        "2m",
        "Objects wait for more than a minute for the operator's pass.",
    ),
    Alert(
        "EverloopCallsHeld",
        "sum(everloop_gateway_held_calls) > 0",
        "30m",
        "{{ $value }} calls of training loops wait, and some have for 30 minutes.",
    ),
)
