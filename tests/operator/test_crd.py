"""The CRD: generated files, what admission refuses and fills in, and the list of fields that may only grow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from everloop_operator.api import crd, names
from everloop_operator.api.training_session import TrainingSessionSpec
from tests.operator.full import GOOD, Schema, places, schema
from tests.operator.full_job import GOOD_JOBS
from tests.operator.world import SESSIONS, Api, session_body

FIELDS = Path(__file__).with_name("fields.txt")
NAMESPACE = "crd"
PATH = f"{SESSIONS}/namespaces/{NAMESPACE}/{names.TRAINING_SESSION_PLURAL}"
ALLOWED = crd.COPIED | {"anyOf", "properties", "items", "additionalProperties", "default"}


def walk(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from walk(node["additionalProperties"], f"{path}{{}}")


def test_files_are_what_the_models_generate(crds: Path) -> None:
    """`make crds` was run, and the YAML means what the generator built."""
    assert {path.name: path.read_text() for path in crds.iterdir()} == crd.files()
    for text, built in zip(crd.files().values(), (crd.rl_job_crd(), crd.training_session_crd()), strict=True):
        assert yaml.safe_load(text) == built
        assert len(text) < 200_000


@pytest.mark.parametrize("definition", [crd.training_session_crd(), crd.rl_job_crd()], ids=["tsess", "rlj"])
def test_every_field_is_described_and_bounded(definition: dict[str, Any]) -> None:
    """Structural lint: known keywords only, a description per field, a limit for every string, list and map."""
    for path, node in walk(schema(definition)):
        assert set(node) <= ALLOWED, path
        if path and path not in ("metadata",) and not path.endswith(("[]", "{}")):
            assert node.get("description"), path
        if path in ("", "apiVersion", "kind", "metadata"):
            continue
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") == "integer":
            assert "minimum" in node, path
        assert node.get("type") != "number", f"{path}: no floats in the API"


@pytest.mark.parametrize(
    ("node", "objects"), [(schema(), GOOD), (schema(crd.rl_job_crd()), GOOD_JOBS)], ids=["tsess", "rlj"]
)
def test_no_pattern_lets_a_line_break_through(node: Schema, objects: tuple[dict[str, Any], ...]) -> None:
    """What is written into addresses, arguments and logs has one line."""
    patterned = [
        (name, child["pattern"], value)
        for body in objects
        for name, _, child, value in places(node, body)
        if name.startswith("spec") and "pattern" in child and isinstance(value, str)
    ]
    assert len(patterned) > 20
    assert [name for name, pattern, value in patterned if not re.search(pattern, value)] == []
    assert [name for name, pattern, value in patterned if re.search(pattern, f"{value}\nx")] == []


def test_fields_only_grow() -> None:
    """A field of v1alpha1 stays: `fields.txt` lists them all, and is changed only by adding lines."""
    assert sorted(path for path, _ in walk(schema()) if path) == sorted(FIELDS.read_text().split())


def test_the_full_objects_have_every_field() -> None:
    """`full.py` sets each field of the spec, so that bad objects made from it try each."""
    known = {path for path, _ in walk(schema()) if path.startswith("spec")}
    assert known - {name for good in GOOD for name, *_ in places(schema(), good)} == set()


def test_the_full_jobs_have_every_field() -> None:
    """As `full.py`; what a session's spec may be is tried there."""
    job = schema(crd.rl_job_crd())
    own = {path for path, _ in walk(job) if path.startswith("spec") and ".template.spec." not in path}
    assert own - {name for good in GOOD_JOBS for name, *_ in places(job, good)} == set()


def test_generator_refuses_what_it_cannot_translate() -> None:
    """A union has no place in a structural schema: an error, never a silent pass-through."""

    class Odd(BaseModel):
        either: int | list[str]

    with pytest.raises(crd.SchemaError, match=r"Odd\.either"):
        crd.structural(Odd)


def test_example_of_the_repository_parses_strictly() -> None:
    """What the examples show are fields of this version."""
    example = Path(__file__).resolve().parents[2] / "examples" / "trainingsession.yaml"
    for document in yaml.safe_load_all(example.read_text()):
        if document["kind"] == names.TRAINING_SESSION_KIND:
            TrainingSessionSpec.model_validate(document["spec"], extra="forbid")


# --- at the API server ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def namespace(api: Api) -> Api:
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return api


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        result[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return result


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"baseModel": {"name": ""}}, "spec.baseModel.name"),
    ({"baseModel": {"name": "x" * 254}}, "spec.baseModel.name"),
    ({"baseModel": {"name": None}}, "spec.baseModel.name"),
    ({"baseModel": {"source": None}}, "spec.baseModel.source"),
    ({"baseModel": {"source": {"claim": None}}}, "exactly one of claim, huggingFace and s3"),
    ({"baseModel": {"source": {"s3": {"uri": "s3://models"}}}}, "exactly one of claim, huggingFace and s3"),
    (
        {"baseModel": {"source": {"claim": None, "huggingFace": {"repo": "org/m"}}}},
        "spec.storage.modelCache must be set",
    ),
    (
        {"baseModel": {"source": {"claim": None, "huggingFace": {"repo": "m"}}}},
        "spec.baseModel.source.huggingFace.repo",
    ),
    ({"baseModel": {"source": {"claim": None, "s3": {"uri": "models"}}}}, "spec.baseModel.source.s3.uri"),
    ({"baseModel": {"source": {"claim": {"claimName": "Upper"}}}}, "spec.baseModel.source.claim.claimName"),
    ({"baseModel": {"source": {"claim": {"path": "/absolute"}}}}, "spec.baseModel.source.claim.path"),
    ({"baseModel": {"source": {"claim": {"path": "a/../../b"}}}}, "spec.baseModel.source.claim.path"),
    ({"image": "i" * 513}, "spec.image"),
    ({"engine": {"dtype": "Float16"}}, "spec.engine.dtype"),
    ({"engine": {"maxSequenceLength": 0}}, "spec.engine.maxSequenceLength"),
    ({"engine": {"threads": 0}}, "spec.engine.threads"),
    ({"engine": {"images": {"maxPixels": 10}}}, "spec.engine.images.maxPixels"),
    ({"engine": {"threads": "two"}}, "spec.engine.threads"),
    ({"workers": {"resources": {"limits": {"cpu": "lots"}}}}, "spec.workers.resources.limits.cpu"),
    ({"workers": {"resources": {"limits": {"cpu": "-1"}}}}, "spec.workers.resources.limits.cpu"),
    ({"workers": {"resources": {"limits": {"cpu": 1}, "requests": {"cpu": "1500m"}}}}, "spec.workers.resources"),
    ({"adapters": {"maxRank": 0}}, "spec.adapters.maxRank"),
    ({"adapters": {"maxModels": 0}}, "spec.adapters.maxModels"),
    ({"storage": None}, "spec.storage"),
    ({"storage": {"journal": {"claim": {"subPath": "../other"}}}}, "spec.storage.journal.claim.subPath"),
    ({"storage": {"journal": {"claim": None}}}, "exactly one of claim and claimTemplate"),
    ({"storage": {"journal": {"claimTemplate": {"size": "1Gi"}}}}, "exactly one of claim and claimTemplate"),
    ({"storage": {"journal": {"claim": None, "claimTemplate": {}}}}, "spec.storage.journal.claimTemplate.size"),
    (
        {"storage": {"journal": {"claim": None, "claimTemplate": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}}}},
        "spec.storage.journal.claimTemplate.accessModes",
    ),
    ({"storage": {"copies": {}}}, "spec.storage.copies.s3"),
    ({"storage": {"copies": {"s3": {"uri": "bucket"}}}}, "spec.storage.copies.s3.uri"),
    (
        {"storage": {"copies": {"s3": {"uri": "s3://bucket", "endpointUrl": "ftp://x"}}}},
        "spec.storage.copies.s3.endpointUrl",
    ),
    ({"snapshots": {"replayBudgetSeconds": 0}}, "spec.snapshots.replayBudgetSeconds"),
    ({"checkpoints": {"everySeconds": -1}}, "spec.checkpoints.everySeconds"),
    ({"checkpoints": {"keepLast": 0}}, "spec.checkpoints.keepLast"),
    ({"recovery": {"infrastructure": {"maxAttempts": 101}}}, "spec.recovery.infrastructure.maxAttempts"),
    ({"recovery": {"infrastructure": {"windowSeconds": 1}}}, "spec.recovery.infrastructure.windowSeconds"),
    ({"recovery": {"forceDeleteAfterSeconds": -1}}, "spec.recovery.forceDeleteAfterSeconds"),
    ({"recovery": {"avoidSeconds": -1}}, "spec.recovery.avoidSeconds"),
    ({"deadlines": {"startupSeconds": 1}}, "spec.deadlines.startupSeconds"),
    ({"deadlines": {"unschedulableSeconds": 1}}, "spec.deadlines.unschedulableSeconds"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=[f"{field}-{n}" for n, (_, field) in enumerate(REFUSED)])
def test_bad_field_is_refused_by_name(namespace: Api, change: dict[str, Any], field: str) -> None:
    """Admission refuses each bad field, and says which one it is."""
    body = session_body("bad")
    body["spec"] = merged(body["spec"], change)
    answer = namespace.request("POST", PATH, body)
    assert answer.status_code == 422, answer.text
    assert re.search(rf"{re.escape(field)}\b", answer.json()["message"]), answer.json()["message"]


@pytest.mark.parametrize("name", ["n" * 41, "dotted.name"])
def test_name_is_limited(namespace: Api, name: str) -> None:
    """Children's names and labels are derived from it."""
    answer = namespace.request("POST", PATH, session_body(name))
    assert answer.status_code == 422
    assert "metadata.name must" in answer.json()["message"]


def test_unknown_field_is_named_under_strict_validation(namespace: Api) -> None:
    """kubectl asks for strict validation: a misspelt field is an error, not silence."""
    body = session_body("strict")
    body["spec"]["engine"] = {"thread": 2}
    answer = namespace.request("POST", f"{PATH}?fieldValidation=Strict", body)
    assert answer.status_code == 400
    assert 'unknown field "spec.engine.thread"' in answer.json()["message"]


def test_defaults_are_filled_in(namespace: Api) -> None:
    """A minimal object comes back complete, and what the server fills in is what the models say."""
    spec = namespace.create(PATH, session_body("minimal"))["spec"]
    parsed = TrainingSessionSpec.model_validate(session_body()["spec"])
    assert spec == without_empty(parsed.model_dump(mode="json", by_alias=True))


def without_empty(value: Any) -> Any:
    """An empty list or map has no default: absent is the same."""
    if not isinstance(value, dict):
        return value
    return {key: without_empty(child) for key, child in value.items() if child not in (None, [], {})}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseModel": {"name": "other"}}, "spec.baseModel is immutable"),
        ({"baseModel": {"revision": "1"}}, "spec.baseModel is immutable"),
        ({"engine": {"dtype": "BFloat16"}}, "spec.engine.dtype is immutable"),
        ({"storage": {"journal": {"claim": {"subPath": "elsewhere"}}}}, "spec.storage.journal is immutable"),
    ],
)
def test_immutable_fields(namespace: Api, request: pytest.FixtureRequest, change: dict[str, Any], message: str) -> None:
    """What the stored state depends on can't be changed; the message names the field."""
    name = f"fixed-{abs(hash(request.node.name)) % 10_000}"
    namespace.create(PATH, session_body(name))
    answer = namespace.request("PATCH", f"{PATH}/{name}", {"spec": change}, "application/merge-patch+json")
    assert answer.status_code == 422
    assert message in answer.json()["message"]


def test_mutable_fields(namespace: Api) -> None:
    """Everything else may be changed."""
    namespace.create(PATH, session_body("free"))
    change = {
        "image": "other:1",
        "engine": {"threads": 4, "maxSequenceLength": 4096},
        "workers": {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": 2, "memory": "1.5Gi"}}},
        "adapters": {"maxRank": 8},
        "snapshots": {"replayBudgetSeconds": 5},
        "checkpoints": {"everySeconds": 60, "keepLast": 5},
        "storage": {"allowNodeLocal": True, "copies": {"s3": {"uri": "s3://bucket/prefix"}}},
        "recovery": {"infrastructure": {"maxAttempts": 1}},
        "deadlines": {"startupSeconds": 60},
    }
    namespace.merge(f"{PATH}/free", {"spec": change})


def test_columns_of_kubectl_get(namespace: Api) -> None:
    """`kubectl get tsess` shows how the session does."""
    namespace.create(PATH, session_body("columns"))
    answer = namespace.request("GET", f"{PATH}/columns", accept="application/json;as=Table;v=v1;g=meta.k8s.io")
    columns = [c["name"] for c in answer.json()["columnDefinitions"] if c["priority"] == 0]
    assert columns == ["Name", "Phase", "Serving", "Models", "Step", "Node", "Attempt", "Recoveries", "Age"]
