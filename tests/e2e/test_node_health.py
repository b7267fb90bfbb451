"""Sessions leave nodes for what each platform says of them, and the loop goes on."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from tests.e2e.waiting import eventually
from tests.e2e.world import NAMESPACE, Everloop
from tests.soak.leg import LINGER_SECONDS, Run, compare, start, wait_told

pytestmark = pytest.mark.cluster

Body = dict[str, Any]


def label(key: str, value: str) -> tuple[str, Body, Body]:
    """A label, and how it is taken away."""
    return "", {"metadata": {"labels": {key: value}}}, {"metadata": {"labels": {key: None}}}


def taint(key: str, effect: str = "NoSchedule") -> tuple[str, Body, Body]:
    """A taint; the list is replaced as a whole."""
    return "", {"spec": {"taints": [{"key": key, "effect": effect}]}}, {"spec": {"taints": None}}


def condition(kind: str, bad: str, reason: str) -> tuple[str, Body, Body]:
    """A condition that turns bad, and good again."""
    good = {"True": "False", "False": "True"}[bad]
    return (
        "status",
        {"status": {"conditions": [{"type": kind, "status": bad, "reason": reason}]}},
        {"status": {"conditions": [{"type": kind, "status": good, "reason": "Repaired"}]}},
    )


SIGNALS = {
    "hyperpod-pending-replacement": label(
        "sagemaker.amazonaws.com/node-health-status", "UnschedulablePendingReplacement"
    ),
    "karpenter-disrupted": taint("karpenter.sh/disrupted"),
    "eks-accelerator": condition("AcceleratedHardwareReady", "False", "NvidiaXID79Error"),
    "gke-impending-termination": taint("cloud.google.com/impending-node-termination"),
    "aks-gpu-missing": condition("GPUMissing", "True", "GPUMissing"),
    "npd-kernel-deadlock": condition("KernelDeadlock", "True", "DockerHung"),
    "nvsentinel-quarantined": label("dgxc.nvidia.com/nvsentinel-state", "quarantined"),
    "node-maintenance-planned": condition("MaintenancePlanned", "True", "Planned"),
}


def patch(everloop: Everloop, node: str, subresource: str, body: Body) -> None:
    """Change a node as its platform's agents do."""
    at = ("--subresource", subresource) if subresource else ()
    everloop.session.tools.kube("patch", "node", node, *at, "--type=strategic", "--patch", json.dumps(body))


def moved(everloop: Everloop, rule: str, attempt: int) -> Body | None:
    """The recovery of a later attempt that names the rule, once that serves, or one after it where it found no room."""
    status = everloop.session.status()
    later = [r for r in status["recoveries"] if r["attempt"] > attempt]
    found = [r for r in later if r.get("rule") == rule]
    if not found or "seconds" not in later[-1] or status["phase"] != "Running":
        return None
    return {**later[-1], **found[-1]}


def strike(everloop: Everloop, run: Run, rule: str) -> tuple[str, Body]:
    """Have the session's node show the signal until the session has left it; the node, and the recovery."""
    status = eventually(lambda: s if (s := everloop.session.status())["phase"] == "Running" else None, "Running", 240)
    node, known = status["pod"]["node"], len(run.told())
    subresource, bad, good = SIGNALS[rule]
    patch(everloop, node, subresource, bad)
    recovery = eventually(lambda: moved(everloop, rule, status["attempt"]), f"a move for {rule}", 240)
    wait_told(run, known)
    patch(everloop, node, subresource, good)
    return node, recovery


def test_a_loop_goes_on_while_its_session_leaves_a_node_of_each_platform(everloop: Everloop, seed: int) -> None:
    """One signal of each profile, or of two at random: another node, rule in the status, event, nothing lost."""
    rules = list(SIGNALS) if os.environ.get("EVERLOOP_TEST_WHOLE") else random.Random(seed).sample(list(SIGNALS), 2)
    stop = everloop.directory / "stop-health"
    run = start(everloop, "health", seed, "--until", str(stop), "--linger", str(LINGER_SECONDS))
    try:
        wait_told(run, 0)
        for rule in rules:
            node, recovery = strike(everloop, run, rule)
            print(f"{rule}: left {node} within {recovery['seconds']} s, replayed {recovery['replayedOperations']}")
            assert (recovery["reason"], recovery["node"], recovery["lostOperations"]) == ("NodeHealth", node, 0)
            assert everloop.session.status()["pod"]["node"] != node
        stop.touch()
        path = run.finish()
    finally:
        run.loop.stop()
    events = everloop.session.tools.get("-n", NAMESPACE, "events")["items"]
    told = " ".join(event["message"] for event in events if event["reason"] == "NodeUnhealthy")
    assert [rule for rule in rules if f"rule {rule}" not in told] == []
    steps, fault = compare(everloop, run, path, seed)
    assert fault == ""
    assert steps > 0
