"""Random histories: whatever happens to nodes, pods and writes, in whatever order, what must always hold holds."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from everloop_operator.api.training_session_status import TrainingSessionStatus
from everloop_operator.core import status
from everloop_operator.core.observed import Node, Observed, Pod, Trainer
from everloop_operator.core.plan import Plan
from tests.operator.builders import CLAIMS, NOW, decided, node, pending, report, session

STEPS = 120


class History:
    """Two nodes and whatever pods there are; every step something may happen to them."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.now: datetime = NOW
        self.status = TrainingSessionStatus()
        self.nodes: dict[str, Node] = {name: node(name) for name in ("node-a", "node-b")}
        self.pods: dict[str, Pod] = {}

    def happen(self) -> None:
        self.now += timedelta(seconds=self._chance.choice([0, 0.1, 1, 3, 30]))
        what = self._chance.random()
        if what < 0.2:
            name = self._chance.choice(list(self.nodes))
            ready = not self.nodes[name].ready
            self.nodes[name] = node(name, ready=ready, not_ready_since=None if ready else self.now)
        elif what < 0.3 and self.pods:
            name = self._chance.choice(list(self.pods))
            if what < 0.25:
                del self.pods[name]
            else:
                self.pods[name] = replace(self.pods[name], phase="Failed")
        elif what < 0.35:
            self.status = TrainingSessionStatus()  # somebody wiped it
        elif what < 0.7:
            self.pods = {name: self._scheduled(pod) for name, pod in self.pods.items()}

    def _scheduled(self, pod: Pod) -> Pod:
        if pod.node or pod.phase != "Pending":
            return pod
        free = [item for item in self.nodes.values() if item.ready and item.hostname not in pod.avoided_nodes]
        if not free:
            return replace(pod, unschedulable_since=pod.unschedulable_since or self.now)
        return replace(
            pod, node=free[0].name, ip="127.0.0.5", phase="Running", scheduled=self.now, unschedulable_since=None
        )

    def observe(self) -> Observed:
        current = max(self.pods.values(), key=lambda pod: pod.attempt, default=None)
        answers = current is not None and current.ip and self._chance.random() < 0.8
        return Observed(
            now=self.now,
            session=session(self.status),
            pods=tuple(self.pods.values()),
            nodes=dict(self.nodes),
            claims=dict(CLAIMS),
            trainer=Trainer(report=report(current.attempt)) if current and answers else Trainer(),
        )

    def carry_out(self, result: Plan) -> None:
        if result.create_pod and result.status:
            name = result.create_pod["metadata"]["name"]
            assert name not in self.pods
            made = pending(result.status.attempt, name=name, uid=f"uid-{name}-{self.now}", created=self.now)
            self.pods[name] = replace(made, avoided_nodes=frozenset(_avoided(result.create_pod["spec"])))
        for deletion in result.delete_pods:
            if deletion.force:
                del self.pods[deletion.name]
            else:
                self.pods[deletion.name] = replace(self.pods[deletion.name], deletion_requested=self.now)
        if result.status and self._chance.random() < 0.9:  # else the write failed
            self.status = TrainingSessionStatus.model_validate(status.dump(result.status))


def _avoided(spec: dict[str, object]) -> list[str]:
    affinity: dict[str, object] = spec.get("affinity", {})  # type: ignore[assignment]
    return [name for name in ("node-a", "node-b") if f"'{name}'" in str(affinity)]


@pytest.mark.parametrize("seed", range(100))
def test_invariants_of_any_history(seed: int) -> None:
    """Attempts never go down, no pod is made twice, the status keeps within its limits, and nothing spins."""
    history = History(seed)
    for _ in range(STEPS):
        history.happen()
        before, result = history.status.attempt, decided(history.observe())
        assert result.status is not None
        assert result.status.attempt >= before
        assert result.requeue_after is None or result.requeue_after > 0
        history.carry_out(result)
        assert decided(history.observe()).create_pod is None, "a second pass at once makes no further pod"
