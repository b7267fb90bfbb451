"""Observations for the tables of the pure tests."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import TrainingSessionStatus
from everloop_operator.core import children
from everloop_operator.core.observed import Claim, Node, Observed, Pod, Session, Trainer
from everloop_operator.core.plan import Plan, Settings, plan
from everloop_operator.core.report import TrainerReport

NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
SETTINGS = Settings(image="trainer:1", endpoint="http://gateway", node_lost_seconds=2.0)
SPEC: dict[str, Any] = {
    "baseModel": {"name": "base/model", "source": {"claim": {"claimName": "models", "path": "base"}}},
    "storage": {"journal": {"claim": {"claimName": "training", "subPath": "everloop"}}},
}
CLAIMS = {
    "training": Claim("training", "uid-training", "Bound", frozenset({"ReadWriteMany"})),
    "models": Claim("models", "uid-models", "Bound", frozenset({"ReadOnlyMany"})),
}


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def spec(**changes: Any) -> TrainingSessionSpec:
    return TrainingSessionSpec.model_validate({**SPEC, **changes})


def session(status: TrainingSessionStatus | None = None, **changes: Any) -> Session:
    return Session(
        namespace="team",
        name="tuned",
        uid="uid-session",
        generation=1,
        deleting=False,
        spec=spec(**changes),
        status=status or TrainingSessionStatus(),
    )


def node(name: str = "node-a", **changes: Any) -> Node:
    return replace(Node(name=name, uid=f"uid-{name}", hostname=name, ready=True), **changes)


def lost(name: str = "node-a", seconds: float = 5.0) -> Node:
    return node(name, ready=False, reason="NodeStatusUnknown", not_ready_since=ago(seconds))


def pod(attempt: int = 1, **changes: Any) -> Pod:
    running = Pod(
        name=f"tuned-a{attempt}-0",
        uid=f"uid-pod-{attempt}",
        attempt=attempt,
        created=ago(100),
        phase="Running",
        node="node-a",
        ip="127.0.0.9",
        ready=True,
        scheduled=ago(90),
        template_hash=children.template_hash(spec()),
    )
    return replace(running, **changes)


def pending(attempt: int = 1, **changes: Any) -> Pod:
    return replace(pod(attempt, phase="Pending", node="", ip="", ready=False, scheduled=None), **changes)


def report(attempt: int = 1, state: str = "Serving", **changes: Any) -> TrainerReport:
    body = {
        "state": state,
        "incarnation": {"number": attempt, "attempt": attempt, "boot": 1, "podUID": f"uid-pod-{attempt}"},
        "baseModel": {"name": "base/model", "revision": "", "manifestSHA256": "ab" * 32},
        "engine": {"pid": 12},
        "lastSnapshotTime": "",
        **changes,
    }
    return TrainerReport.model_validate(body)


def observed(**changes: Any) -> Observed:
    """A session that has been told to exist, with one healthy node and bound claims."""
    base = Observed(now=NOW, session=session(), nodes={"node-a": node()}, claims=dict(CLAIMS))
    return replace(base, **changes)


def serving(attempt: int = 1, status: TrainingSessionStatus | None = None, **changes: Any) -> Observed:
    """A session whose pod serves, as it is just after the status said so."""
    first = observed(
        session=session(status or TrainingSessionStatus(attempt=attempt)),
        pods=(pod(attempt),),
        trainer=Trainer(report=report(attempt)),
    )
    desired = decided(first).status
    assert desired is not None
    return replace(first, session=replace(first.session, status=desired), **changes)


def decided(observation: Observed) -> Plan:
    return plan(observation, SETTINGS)


def status_of(result: Plan) -> TrainingSessionStatus:
    assert result.status is not None
    return result.status


def after(observation: Observed, result: Plan, **changes: Any) -> Observed:
    """The next observation, once the plan's status is written."""
    return replace(observation, session=replace(observation.session, status=status_of(result)), **changes)


def condition(result: Plan, kind: str) -> tuple[str, str, str]:
    found = next(c for c in status_of(result).conditions if c.type == kind)
    return found.status, found.reason, found.message
