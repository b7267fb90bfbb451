"""The CRD of RLJob at the API server: what admission refuses, fills in, and shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from everloop_operator.api import crd, names
from everloop_operator.api.rl_job import RLJobSpec
from tests.operator import builders
from tests.operator.full import schema
from tests.operator.full_job import DRIVER_POD
from tests.operator.job_builders import SPEC
from tests.operator.test_crd import merged, walk
from tests.operator.world import SESSIONS, Api

FIELDS = Path(__file__).with_name("job_fields.txt")
NAMESPACE = "jobs"
PATH = f"{SESSIONS}/namespaces/{NAMESPACE}/{names.RL_JOB_PLURAL}"
RUNNER = SPEC["runner"]


def job_body(name: str = "poems", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.RL_JOB_KIND,
        "metadata": {"name": name},
        "spec": {**SPEC, **spec},
    }


def test_fields_only_grow() -> None:
    """A field of v1alpha1 stays: `job_fields.txt` lists all but those of the session, changed by adding lines only."""
    template = "spec.session.template.spec."
    found = [path for path, _ in walk(schema(crd.rl_job_crd())) if path and not path.startswith(template)]
    assert found == FIELDS.read_text().split()


def test_example_of_the_repository_parses_strictly() -> None:
    """What the example shows are fields of this version."""
    example = Path(__file__).resolve().parents[2] / "examples" / "own-loop" / "rljob.yaml"
    RLJobSpec.model_validate(yaml.safe_load(example.read_text())["spec"], extra="forbid")


@pytest.fixture(scope="module")
def namespace(api: Api) -> Api:
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return api


def env(*others: dict[str, Any], **variable: Any) -> dict[str, Any]:
    return {"runner": {"env": [*others, variable]}}


def pod(**additions: Any) -> dict[str, Any]:
    return {"runner": {"pod": additions}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"runtime": "Ray"}, "spec.runtime"),
    ({"session": None}, "spec.session"),
    ({"session": {"ref": None}}, "spec.session"),
    ({"session": {"template": {"spec": builders.SPEC}}}, "spec.session"),
    ({"session": {"ref": {"name": "n" * 41}}}, "spec.session.ref.name"),
    ({"session": {"ref": None, "template": {"spec": {}}}}, "spec.session.template.spec.baseModel"),
    ({"start": {}}, "spec.start.checkpoint"),
    ({"start": {"checkpoint": {"uri": "s3://elsewhere"}}}, "spec.start.checkpoint.uri"),
    ({"start": {"checkpoint": {"uri": "tinker://m/sampler_weights/x"}}}, "spec.start.checkpoint.uri"),
    ({"runner": None}, "spec.runner"),
    ({"runner": {"image": None}}, "spec.runner.image"),
    ({"runner": {"image": ""}}, "spec.runner.image"),
    ({"runner": {"command": None}}, "spec.runner.command"),
    ({"runner": {"command": []}}, "spec.runner.command"),
    ({"runner": {"command": "python loop.py"}}, "spec.runner.command"),
    ({"runner": {"terminationGracePeriodSeconds": -1}}, "spec.runner.terminationGracePeriodSeconds"),
    ({"runner": {"resources": {"limits": {"cpu": "lots"}}}}, "spec.runner.resources.limits.cpu"),
    (env(name="1A"), r"spec.runner.env\[0\].name"),
    (env(name="TINKER_API_KEY", value="x"), r"spec.runner: .*env: a variable of this name"),
    (env(name="TINKER_BASE_URL", value="x"), r"spec.runner: .*env: a variable of this name"),
    (env({"name": "A"}, name="TINKER_API_KEY", value="x"), r"spec.runner: .*env: a variable of this name"),
    (env(name="EVERLOOP_STATE_DIR", value="/etc"), r"spec.runner.env\[0\].name"),
    (env(name="A", value="x", valueFrom={"secretKeyRef": {"name": "s", "key": "k"}}), r"spec.runner.env\[0\]"),
    (env(name="A", valueFrom={}), r"spec.runner.env\[0\].valueFrom"),
    (pod(labels={"everloop.dev/attempt": "9"}), "spec.runner.pod.labels"),
    (pod(securityContext={"runAsUser": 0}), "spec.runner.pod.securityContext.runAsUser"),
    (pod(volumes=[{"name": "journal", "emptyDir": {}}]), r"spec.runner.pod.volumes\[0\].name"),
    (pod(volumes=[{"name": "data", "hostPath": {"path": "/"}}]), r"spec.runner.pod.volumes\[0\]"),
    (pod(volumeMounts=[{"name": "data", "mountPath": "/data"}]), "every name in volumeMounts must be one of volumes"),
    (pod(volumeMounts=[{"name": "data", "mountPath": "/var/lib/everloop/state"}]), r"volumeMounts\[0\].mountPath"),
    ({"deadlines": {"progressSeconds": 5}}, "spec.deadlines.progressSeconds"),
    ({"goal": {"metric": "reward"}}, "spec.goal.value"),
    ({"goal": {"metric": "reward", "value": "much"}}, "spec.goal.value"),
    ({"goal": {"metric": "a b", "value": "1"}}, "spec.goal.metric"),
    ({"goal": {"metric": "reward", "value": "1", "consecutive": 0}}, "spec.goal.consecutive"),
    ({"goal": {"metric": "reward", "value": "1", "direction": "Up"}}, "spec.goal.direction"),
    ({"limits": {"maxIterations": 0}}, "spec.limits.maxIterations"),
    ({"limits": {"activeSeconds": 0}}, "spec.limits.activeSeconds"),
    ({"recovery": {"application": {"maxAttempts": -1}}}, "spec.recovery.application.maxAttempts"),
    ({"recovery": {"infrastructure": {"windowSeconds": 1}}}, "spec.recovery.infrastructure.windowSeconds"),
    ({"seed": -1}, "spec.seed"),
    ({"suspend": "yes"}, "spec.suspend"),
    ({"ttlSecondsAfterFinished": -1}, "spec.ttlSecondsAfterFinished"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=[f"{field}-{n}" for n, (_, field) in enumerate(REFUSED)])
def test_bad_field_is_refused_by_name(namespace: Api, change: dict[str, Any], field: str) -> None:
    """Admission refuses each bad field, and says which one it is."""
    body = job_body("bad")
    body["spec"] = merged(body["spec"], change)
    answer = namespace.request("POST", PATH, body)
    assert answer.status_code == 422, answer.text
    assert re.search(field, answer.json()["message"]), answer.json()["message"]


def test_fields_of_the_built_in_runner_are_not_there_yet(namespace: Api) -> None:
    """What does not work is not in the schema: strict validation names it."""
    body = job_body("strict", environment={"builtin": "VisualMaze"})
    answer = namespace.request("POST", f"{PATH}?fieldValidation=Strict", body)
    assert answer.status_code == 400
    assert 'unknown field "spec.environment"' in answer.json()["message"]


def test_defaults_are_filled_in(namespace: Api) -> None:
    """A minimal object comes back complete, and what the server fills in is what the models say."""
    spec = namespace.create(PATH, job_body("minimal"))["spec"]
    expected = RLJobSpec.model_validate(SPEC).model_dump(mode="json", by_alias=True, exclude_none=True)
    # Empty maps and lists have no default: absent is the same.
    expected["runner"] = {name: value for name, value in expected["runner"].items() if value != []}
    expected["runner"]["pod"] = {
        name: value for name, value in expected["runner"]["pod"].items() if value not in ([], {})
    }
    expected["runner"]["resources"] = spec["runner"]["resources"]
    assert spec == expected
    assert spec["recovery"]["application"] == {"maxAttempts": 3, "windowSeconds": 3600}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"session": {"ref": {"name": "other"}}}, "spec.session is immutable"),
        ({"start": {"checkpoint": {"uri": "tinker://m/weights/x"}}}, "spec.start is immutable"),
    ],
)
def test_immutable_fields(namespace: Api, request: pytest.FixtureRequest, change: dict[str, Any], message: str) -> None:
    """What a job has begun with can't be changed; the message names the field."""
    name = f"fixed-{abs(hash(request.node.name)) % 10_000}"
    namespace.create(PATH, job_body(name))
    answer = namespace.request("PATCH", f"{PATH}/{name}", {"spec": change}, "application/merge-patch+json")
    assert answer.status_code == 422
    assert message in answer.json()["message"]


def test_start_is_immutable(namespace: Api) -> None:
    """Neither another one nor none; what has nothing to do with it may change."""
    namespace.create(PATH, job_body("begun", start={"checkpoint": {"uri": "tinker://m/weights/x"}}))
    for start in ({"checkpoint": {"uri": "tinker://m/weights/y"}}, None):
        change = {"spec": {"start": start}}
        answer = namespace.request("PATCH", f"{PATH}/begun", change, "application/merge-patch+json")
        assert answer.status_code == 422
        assert "spec.start is immutable" in answer.json()["message"]
    namespace.merge(f"{PATH}/begun", {"spec": {"seed": 4}})


def test_mutable_fields(namespace: Api) -> None:
    """Everything else may be changed."""
    namespace.create(PATH, job_body("free"))
    change = {
        "runner": {"image": "loop:2", "args": ["--fast"], "env": [{"name": "A", "value": "b"}], "pod": DRIVER_POD},
        "goal": {"metric": "eval/solved", "value": "0.95", "consecutive": 2},
        "limits": {"maxIterations": 9, "activeSeconds": 9},
        "deadlines": {"progressSeconds": 90},
        "recovery": {"application": {"maxAttempts": 9}},
        "seed": 3,
        "suspend": True,
        "ttlSecondsAfterFinished": 1,
    }
    namespace.merge(f"{PATH}/free", {"spec": change})


def test_columns_of_kubectl_get(namespace: Api) -> None:
    """`kubectl get rlj` shows how the job does."""
    namespace.create(PATH, job_body("columns"))
    answer = namespace.request("GET", f"{PATH}/columns", accept="application/json;as=Table;v=v1;g=meta.k8s.io")
    columns = [c["name"] for c in answer.json()["columnDefinitions"] if c["priority"] == 0]
    assert columns == ["Name", "Phase", "Iteration", "Reward", "Evaluation", "ETA", "Age"]
