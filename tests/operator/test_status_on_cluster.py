"""The status as the API server keeps it: nothing that is written is pruned, and `kubectl get` finds its columns."""

from __future__ import annotations

from typing import Any

import pytest

from everloop_operator.api import crd, names
from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.api.schema import ApiModel
from everloop_operator.api.training_session_status import TrainingSessionStatus
from tests.operator.full import GOOD, Schema, schema
from tests.operator.full_job import GOOD_JOBS
from tests.operator.world import SESSIONS, Api

NAMESPACE = "statuses"
MERGE = "application/merge-patch+json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
NEEDED = (names.CONDITION_SERVING, names.CONDITION_READY)
"""Conditions that columns are made of."""
KINDS = [
    pytest.param(names.TRAINING_SESSION_PLURAL, crd.training_session_crd(), GOOD[0], TrainingSessionStatus, id="tsess"),
    pytest.param(names.RL_JOB_PLURAL, crd.rl_job_crd(), GOOD_JOBS[0], RLJobStatus, id="rlj"),
]


@pytest.fixture(scope="module")
def namespace(api: Api) -> Api:
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return api


def filled(node: Schema) -> Any:
    """A value in which every field of the schema is set."""
    if "enum" in node:
        return next(word for word in node["enum"] if word)
    if "properties" in node:
        return {name: filled(child) for name, child in node["properties"].items()}
    match node.get("type"):
        case "array":
            return [filled(node["items"])]
        case "object":
            return {"a": filled(node["additionalProperties"])}
        case "boolean":
            return True
        case "integer":
            return max(1, node.get("minimum", 1))
        case "string":
            return "2026-05-01T12:00:00Z" if node.get("format") == "date-time" else "1"
    raise AssertionError(f"a value for {node}")


@pytest.mark.parametrize(("plural", "definition", "good", "model"), KINDS)
def test_every_field_of_a_status_is_kept(
    namespace: Api, plural: str, definition: dict[str, Any], good: dict[str, Any], model: type[ApiModel]
) -> None:
    """Written with every field under strict validation it is read back as it was, and no column stays empty."""
    status = filled(schema(definition)["properties"]["status"])
    [condition] = status["conditions"]
    status["conditions"] = [{**condition, "type": kind} for kind in NEEDED]
    model.model_validate(status, extra="forbid")
    path = f"{SESSIONS}/namespaces/{NAMESPACE}/{plural}"
    namespace.create(path, {**good, "metadata": {"name": "full"}})
    place = f"{path}/full/status?fieldValidation=Strict"
    answer = namespace.request("PATCH", place, {"status": status}, MERGE)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == status
    # An operator may be at work too, so the table is that of a write as well.
    table = namespace.request("PATCH", place, {"status": status}, MERGE, TABLE).json()
    [row] = table["rows"]
    cells = dict(zip((column["name"] for column in table["columnDefinitions"]), row["cells"], strict=True))
    assert [name for name, cell in cells.items() if cell in (None, "")] == []


@pytest.mark.parametrize(("plural", "definition", "good", "model"), KINDS)
def test_models_and_schema_have_the_same_fields(
    plural: str, definition: dict[str, Any], good: dict[str, Any], model: type[ApiModel]
) -> None:
    """A field that the operator writes and the schema lacks would vanish without a word."""

    def fields(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: fields(value) for key, value in node.items()}
        return [fields(item) for item in node] if isinstance(node, list) else None

    status = filled(schema(definition)["properties"]["status"])
    written = model.model_validate(status, extra="forbid").model_dump(mode="json", by_alias=True)
    assert fields(written) == fields(status)
