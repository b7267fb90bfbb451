"""What is counted, and who is told: pure functions over plain values, and the port in this process."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric

from everloop_gateway.holding import Kind
from everloop_gateway.metrics import REGISTRY as GATEWAY_REGISTRY
from everloop_gateway.metrics import CallsUnderWay
from everloop_gateway.upstream import Progress
from everloop_metrics.endpoint import listening
from everloop_operator.api import names, tokens
from everloop_operator.core.gpus import held
from everloop_operator.core.interruptions import Interruption, Interruptions, between
from everloop_operator.core.node_rules import Severity, Signal
from everloop_operator.core.report import MOST_TOKEN_COUNTS
from everloop_operator.loop import metrics
from everloop_operator.loop.kept import summary_of
from everloop_operator.loop.ports import Key, job_key
from everloop_operator.loop.state_metrics import nodes, objects, trainers
from tests.networks import new_address
from tests.operator.builders import NOW, ago, node, pod, report, text

GOING_ON = {"id": "a2", "reason": "NodeHealth", "rule": "xid"}
OVER = {**GOING_ON, "seconds": "7.5", "replayedOperations": 4, "lostOperations": 1}
ENGINE = {"id": "e1", "reason": "EngineLost", "seconds": "0.3", "replayedOperations": 2}
MOVED = Interruption("NodeHealth", "xid", 7.5, 4, 1)
FORKED = Interruption("EngineLost", "", 0.3, 2, 0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([], [GOING_ON], Interruptions(begun=(Interruption("NodeHealth", "xid"),))),
        ([GOING_ON], [OVER], Interruptions(ended=(MOVED,))),
        ([GOING_ON], [GOING_ON], Interruptions()),
        ([OVER], [OVER, ENGINE], Interruptions(begun=(FORKED,), ended=(FORKED,))),
        ([OVER, ENGINE], [ENGINE], Interruptions()),
    ],
)
def test_each_interruption_begins_and_ends_once(
    before: list[dict[str, Any]], after: list[dict[str, Any]], expected: Interruptions
) -> None:
    """What a status repeats, or has no room for any more, is not counted again."""
    assert between({"recoveries": before}, {"recoveries": after}) == expected


def test_interruptions_are_counted_by_reason_rule_and_figures() -> None:
    """Each instrument takes its part."""

    def value(name: str, **labels: str) -> float:
        return metrics.REGISTRY.get_sample_value(name, labels) or 0.0

    def values() -> tuple[float, ...]:
        session = {"kind": names.TRAINING_SESSION_KIND, "reason": "NodeHealth"}
        return (
            value("everloop_recoveries_total", **session),
            value("everloop_recovery_seconds_sum", kind=names.TRAINING_SESSION_KIND),
            value("everloop_node_moves_total", rule="xid"),
            value("everloop_replayed_operations_total"),
            value("everloop_lost_operations_total"),
        )

    before = values()
    metrics.count(names.TRAINING_SESSION_KIND, Interruptions(begun=(MOVED,), ended=(MOVED,)))
    assert tuple(now - then for then, now in zip(before, values(), strict=True)) == (1, 7.5, 1, 4, 1)


def test_every_reason_of_a_recovery_starts_from_zero() -> None:
    """So that the first one is an increase; the list is that of the names."""
    reasons = {value for name, value in vars(names).items() if name.startswith("RECOVERY_") and isinstance(value, str)}
    assert set(names.RECOVERY_REASONS) == reasons
    labels = {"kind": names.RL_JOB_KIND, "reason": "Resumed"}
    assert metrics.REGISTRY.get_sample_value("everloop_recoveries_total", labels) is not None


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([{"nvidia.com/gpu": "2", "memory": "8Gi"}], 2),
        ([{"amd.com/gpu": 1}, {"nvidia.com/mig-1g.5gb": "1"}], 2),
        ([{"aws.amazon.com/neuroncore": "4"}], 4),
        ([{"nvidia.com/gpu": "1k"}], 0),
        ([{"cpu": "3500m", "vpc.amazonaws.com/efa": "4"}, {}], 0),
    ],
)
def test_gpus_are_devices_of_that_kind(limits: list[dict[str, Any]], expected: int) -> None:
    """Of all containers; neither cores nor network devices."""
    assert held({"containers": [{"resources": {"limits": each}} for each in limits] + [{}]}) == expected


def test_gpus_of_sidecars_count_and_those_of_containers_that_end_do_not() -> None:
    """What runs beside the trainer holds its devices; what has run before it has given them back."""
    one = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    assert held({"initContainers": [one, {**one, "restartPolicy": "Always"}], "containers": [one]}) == 2


WORK = {
    "operations": [{"kind": "optim_step", "outcome": "succeeded", "count": 3}],
    "usefulSeconds": "12.5",
    "replaySeconds": "0.25",
    "stepSeconds": {"wait": "1.5", "forward": "2", "backward": "4", "optimizer": "0.5", "journal": "0.25"},
    "tokens": [{"model": "m-0123456789ab", "key": "0123456789ab", "kind": "trained", "count": 70}],
}


def samples(families: Any) -> dict[tuple[str, ...], float]:
    """Name and label values -> value."""
    found: list[Metric] = list(families)
    return {(s.name, *s.labels.values()): s.value for family in found for s in family.samples}


def test_objects_are_told_by_phase_and_those_that_are_stuck_by_reason() -> None:
    """Every phase has a value, so that one that empties drops to zero."""
    stalled = {"type": "Stalled", "status": "True", "reason": "BudgetExhausted"}
    told = samples(
        objects(
            {
                Key("team", "a"): summary_of({"phase": "Running", "conditions": [{**stalled, "status": "False"}]}),
                Key("team", "b"): summary_of({"phase": "Failed", "conditions": [stalled]}),
                job_key("team", "c"): summary_of({"phase": "Running"}),
                Key("team", "new"): summary_of({}),
            }
        )
    )
    assert told["everloop_sessions", "Running"] == 1
    assert told["everloop_sessions", "Recovering"] == 0
    assert told["everloop_jobs", "Running"] == 1
    assert {key: value for key, value in told.items() if key[0] == "everloop_stalled"} == {
        ("everloop_stalled", "TrainingSession", "BudgetExhausted"): 1
    }


def signal(seconds: float = 30.0, **changes: Any) -> Signal:
    shown = Signal("xid", Severity.MOVE_NOW, "label xid=79", since=ago(seconds), due=ago(seconds - 10))
    return replace(shown, **changes)


def test_signals_count_once_they_have_lasted_and_moves_beyond_the_cap_are_held_back() -> None:
    """Three of four nodes with pods show a fault: more than two, so the rule is doubted."""
    seen = {f"n{i}": node(f"n{i}", signals=(signal(),)) for i in range(3)}
    seen["n3"] = node("n3", signals=(signal(seconds=5),))
    hosting = dict.fromkeys(seen, 1)
    told = samples(nodes(seen, hosting, 0.2, NOW))
    assert told["everloop_node_signals", "xid", "MoveNow"] == 3
    assert (told["everloop_nodes_to_leave",], told["everloop_node_moves_held_back",]) == (3, 3)
    told = samples(nodes(seen, {"n0": 1, "n3": 1}, 0.2, NOW))
    assert (told["everloop_nodes_to_leave",], told["everloop_node_moves_held_back",]) == (1, 0)


def test_trainers_are_told_by_pod() -> None:
    """Held seconds from the moment of scheduling, times GPUs; nothing of what no report says."""
    said = report(
        lastSnapshotTime=text(NOW - timedelta(seconds=40)),
        storage={"error": "no space"},
        replayMismatches=2,
        waitingOperations=5,
        work=WORK,
    )
    running, ended = pod(scheduled=ago(90), gpus=2), pod(2, phase="Failed", gpus=2)
    told = samples(trainers([(Key("team", "tuned"), running, said), (Key("team", "tuned"), ended, None)], NOW))
    of = ("team", "tuned", "tuned-a1-0")
    assert told == {
        ("everloop_gpu_held_seconds_total", *of): 180,
        ("everloop_snapshot_age_seconds", *of): 40,
        ("everloop_storage_failing", *of): 1,
        ("everloop_replay_mismatches_total", *of): 2,
        ("everloop_waiting_operations", *of): 5,
        ("everloop_operations_total", *of, "optim_step", "succeeded"): 3,
        ("everloop_gpu_useful_seconds_total", *of): 25,
        ("everloop_replay_seconds_total", *of): 0.25,
        ("everloop_step_seconds_total", *of, "wait"): 1.5,
        ("everloop_step_seconds_total", *of, "forward"): 2,
        ("everloop_step_seconds_total", *of, "backward"): 4,
        ("everloop_step_seconds_total", *of, "optimizer"): 0.5,
        ("everloop_step_seconds_total", *of, "journal"): 0.25,
        ("everloop_tokens_total", *of, "m-0123456789ab", "0123456789ab", "trained"): 70,
    }


def test_no_report_breaks_a_scrape() -> None:
    """A session pod's image is the tenant's: what it says must fit into a number."""
    told = samples(trainers([(Key("team", "tuned"), pod(), report(replayMismatches=10**400))], NOW))
    assert told["everloop_replay_mismatches_total", "team", "tuned", "tuned-a1-0"] == 2**53
    assert not [name for name in told if name[0] == "everloop_waiting_operations"], "an older trainer does not say"
    with pytest.raises(ValueError, match="waitingOperations"):
        report(waitingOperations=10**400)
    with pytest.raises(ValueError, match="count"):
        report(work={"operations": [{"kind": "sample", "outcome": "failed", "count": 10**400}]})
    counted = {"model": "base", "key": "other", "kind": "sampled", "count": 1}
    assert len(report(work={"tokens": [counted] * MOST_TOKEN_COUNTS}).work.tokens) == MOST_TOKEN_COUNTS
    for counts, field in (
        ([counted] * (MOST_TOKEN_COUNTS + 1), "tokens"),
        ([{**counted, "model": "m-of-my-own"}], "model"),
        ([{**counted, "key": "whose"}], "key"),
        ([{**counted, "kind": "dreamt"}], "kind"),
    ):
        with pytest.raises(ValueError, match=field):
            report(work={"tokens": counts})


def test_calls_are_held_while_they_wait_for_something() -> None:
    """A call that only takes its time is under way, no more; equal calls are two."""
    calls = CallsUnderWay()
    waiting = Progress()
    with calls.under_way(Kind.TRAIN, Progress()), calls.under_way(Kind.TRAIN, waiting):
        assert samples(calls.collect())["everloop_gateway_calls", "train"] == 2
        assert samples(calls.collect())["everloop_gateway_held_calls", "train"] == 0
        waiting.waits("its session pod was replaced")
        assert samples(calls.collect())["everloop_gateway_held_calls", "train"] == 1
    assert samples(calls.collect())["everloop_gateway_calls", "train"] == 0
    assert GATEWAY_REGISTRY.get_sample_value("everloop_gateway_upstream_retries_total", {"kind": "save"}) is not None


@pytest.mark.parametrize(
    ("shown", "status"),
    [(None, 401), ("Bearer ", 401), ("Bearer other", 401), ("Bearer \xe4", 401), ("Bearer right", 200)],
)
async def test_metrics_are_for_those_who_have_the_token(shown: str | None, status: int) -> None:
    """Nobody else learns anything, and nobody at all before there is a token."""
    registry = CollectorRegistry()
    Counter("secret", "A name.", registry=registry).inc()
    known: list[str] = []
    address, headers = new_address(), {} if shown is None else {"Authorization": shown}
    async with listening(registry, address, names.METRICS_PORT, lambda: known[0] if known else None):
        async with aiohttp.ClientSession() as client:
            url = f"http://{address}:{names.METRICS_PORT}/metrics"
            async with client.get(url, headers=headers) as answer:
                assert (answer.status, await answer.text()) == (503, "")
            known.append("right")
            async with client.get(url, headers=headers) as answer:
                assert answer.status == status
                assert ("secret_total 1.0" in await answer.text()) == (status == 200)


def test_metrics_token_is_of_the_installation() -> None:
    """Another master key, another token; and none that opens anything else."""
    one, other = bytes(32), bytes([1] * 32)
    assert tokens.metrics_token(one) != tokens.metrics_token(other)
    assert len(tokens.metrics_token(one)) == 64
