"""The panels of the dashboard: the one place where their queries stand."""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL = "$__rate_interval"
"""Grafana puts four scrape intervals or more here."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, and the legend of its series in Grafana's form."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram over time."""

    title: str
    text: str
    """What it shows, for people."""
    queries: tuple[Query, ...]
    unit: str = "short"
    """Grafana's name of the unit."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


def _increase(metric: str, by: str, legend: str) -> Query:
    return Query(f"sum by ({by}) (increase({metric}[{INTERVAL}]))", legend)


ROWS = (
    Row(
        "Sessions and jobs",
        (
            Panel(
                "Sessions by phase",
                "TrainingSessions in each phase.",
                (Query("sum by (phase) (everloop_sessions)", "{{phase}}"),),
            ),
            Panel("Jobs by phase", "RLJobs in each phase.", (Query("sum by (phase) (everloop_jobs)", "{{phase}}"),)),
            Panel(
                "In need of help",
                "Objects whose condition Stalled is True, by its reason.",
                (Query("sum by (kind, reason) (everloop_stalled)", "{{kind}} {{reason}}"),),
            ),
            Panel(
                "Interruptions",
                "Recoveries that began, by reason.",
                (_increase("everloop_recoveries_total", "kind, reason", "{{kind}} {{reason}}"),),
            ),
            Panel(
                "Length of recoveries",
                "Median and 95th percentile of the last hour, from detection until every model was restored.",
                tuple(
                    Query(
                        f"histogram_quantile({share}, sum by (le) (increase(everloop_recovery_seconds_bucket[1h])))",
                        legend,
                    )
                    for share, legend in ((0.5, "median"), (0.95, "95 %"))
                ),
                "s",
            ),
            Panel(
                "Operations in recoveries",
                "Computed again, and lost. Lost must stay 0.",
                (
                    Query(f"sum(increase(everloop_replayed_operations_total[{INTERVAL}]))", "replayed"),
                    Query(f"sum(increase(everloop_lost_operations_total[{INTERVAL}]))", "lost"),
                ),
            ),
        ),
    ),
    Row(
        "Training",
        (
            Panel(
                "GPUs held",
                "By session pods, from the moment that they have a node.",
                (Query(f"sum by (namespace) (rate(everloop_gpu_held_seconds_total[{INTERVAL}]))", "{{namespace}}"),),
            ),
            Panel(
                "Goodput",
                "Share of the held GPU seconds in which an operation was computed for the first time.",
                (
                    Query(
                        f"sum by (namespace) (rate(everloop_gpu_useful_seconds_total[{INTERVAL}])) "
                        f"/ sum by (namespace) (rate(everloop_gpu_held_seconds_total[{INTERVAL}]) > 0)",
                        "{{namespace}}",
                    ),
                ),
                "percentunit",
            ),
            Panel(
                "Operations",
                "That ended in a second, by kind and outcome.",
                (
                    Query(
                        f"sum by (kind, outcome) (rate(everloop_operations_total[{INTERVAL}]))",
                        "{{kind}} {{outcome}}",
                    ),
                ),
                "ops",
            ),
            Panel(
                "Waiting operations",
                "Accepted by a session and without a result yet, those that run among them.",
                (Query("sum by (namespace) (everloop_waiting_operations)", "{{namespace}}"),),
            ),
            Panel(
                "Where the time of steps goes",
                "Share of the time in which operations of models waited for the engine though it was their turn, and "
                "were in each part of it.",
                (Query(f"sum by (part) (rate(everloop_step_seconds_total[{INTERVAL}]))", "{{part}}"),),
                "percentunit",
            ),
            Panel(
                "Tokens",
                "In a second, by kind: of forward_backward, of forward alone, of the prompts of samples, and sampled.",
                (Query(f"sum by (kind) (rate(everloop_tokens_total[{INTERVAL}]))", "{{kind}}"),),
            ),
            Panel(
                "Tokens by key",
                "In a second, of all kinds and models. A key is shown by its id, the first part of its text.",
                (Query(f"sum by (namespace, key) (rate(everloop_tokens_total[{INTERVAL}]))", "{{namespace}} {{key}}"),),
            ),
            Panel(
                "Replay",
                "Share of the time in which models were brought back into an engine.",
                (Query(f"sum by (namespace) (rate(everloop_replay_seconds_total[{INTERVAL}]))", "{{namespace}}"),),
                "percentunit",
            ),
            Panel(
                "Age of the newest snapshot",
                "The oldest in each namespace. Of a session at rest it grows, and does no harm.",
                (Query("max by (namespace) (everloop_snapshot_age_seconds)", "{{namespace}}"),),
                "s",
            ),
            Panel(
                "Trouble with storage and replay",
                "Sessions whose storage takes no more, and operations whose result differed when computed again.",
                (
                    Query("sum(everloop_storage_failing)", "storage failing"),
                    Query("sum(everloop_replay_mismatches_total)", "replay mismatches"),
                ),
            ),
        ),
    ),
    Row(
        "Nodes",
        (
            Panel(
                "Signals",
                "Nodes that show a signal now, by rule.",
                (Query("sum by (rule, severity) (everloop_node_signals)", "{{rule}} ({{severity}})"),),
            ),
            Panel(
                "Moves",
                "Sessions that left a node for its health, by rule.",
                (_increase("everloop_node_moves_total", "rule", "{{rule}}"),),
            ),
            Panel(
                "Nodes to leave",
                "Nodes with session pods that show signals to leave them, and those that are not left because they are "
                "too many.",
                (
                    Query("sum(everloop_nodes_to_leave)", "to leave"),
                    Query("sum(everloop_node_moves_held_back)", "held back"),
                ),
            ),
        ),
    ),
    Row(
        "Operator",
        (
            Panel(
                "Passes",
                "Passes in a second, by kind and how they ended.",
                (
                    Query(
                        f"sum by (kind, outcome) (rate(everloop_reconcile_seconds_count[{INTERVAL}]))",
                        "{{kind}} {{outcome}}",
                    ),
                ),
                "ops",
            ),
            Panel(
                "Length of passes",
                "95th percentile, by kind.",
                (
                    Query(
                        "histogram_quantile(0.95, sum by (le, kind) "
                        f"(rate(everloop_reconcile_seconds_bucket[{INTERVAL}])))",
                        "{{kind}}",
                    ),
                ),
                "s",
            ),
            Panel(
                "Queue",
                "Objects that wait for a pass, and for how long the first of them has.",
                (
                    Query("sum(everloop_queue_depth)", "objects"),
                    Query("max(everloop_queue_oldest_seconds)", "seconds"),
                ),
            ),
            Panel(
                "Requests to the API server",
                "By verb and status code; error: no answer.",
                (Query(f"sum by (verb, code) (rate(everloop_api_requests_total[{INTERVAL}]))", "{{verb}} {{code}}"),),
                "reqps",
            ),
        ),
    ),
    Row(
        "Gateway",
        (
            Panel(
                "Answers",
                "To clients, by route and status code.",
                (
                    Query(
                        f"sum by (route, code) (rate(everloop_gateway_requests_total[{INTERVAL}]))",
                        "{{route}} {{code}}",
                    ),
                ),
                "reqps",
            ),
            Panel(
                "Calls under way",
                "All of them, and those that wait for a session or the Kubernetes API to be back.",
                (
                    Query("sum by (kind) (everloop_gateway_calls)", "{{kind}}"),
                    Query("sum by (kind) (everloop_gateway_held_calls)", "{{kind}}, held"),
                ),
            ),
            Panel(
                "Calls sent again",
                "To session pods that had not answered.",
                (_increase("everloop_gateway_upstream_retries_total", "kind", "{{kind}}"),),
            ),
        ),
    ),
)
