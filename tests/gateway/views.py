"""A TrainingSession as the gateway sees it, for the tables of the pure tests."""

from __future__ import annotations

from everloop_gateway.routing import Claim, Incarnation, SessionView
from everloop_operator.api import names

POD = Incarnation(3, "pod-uid", "10.0.0.1")
VIEW = SessionView(
    namespace="team",
    name="a",
    uid="uid-a",
    base_model="org/small",
    max_sequence_length=2048,
    created="2030-01-01T00:00:00Z",
    default=False,
    deleting=False,
    phase=names.PHASE_RUNNING,
    explanation="",
    incarnation=POD,
    model_count=0,
    max_models=16,
    claim=Claim("journal", "uid-claim"),
    lineage="lineage-a",
    missing_claim="",
)
