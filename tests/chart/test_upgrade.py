"""The real Helm against a real API server: CRDs through upgrade, uninstallation and another installation."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everloop_operator.api import crd, names
from tests.chart.conftest import CHART, Helm
from tests.operator.control_plane import ControlPlane, running
from tests.operator.full_job import GOOD_JOBS
from tests.operator.world import RELEASE, SESSIONS, Api, eventually, session_body

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.TRAINING_SESSION_PLURAL}.{names.GROUP}"
NAMESPACE = "team"
PATH = f"{SESSIONS}/namespaces/{NAMESPACE}/{names.TRAINING_SESSION_PLURAL}"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with running(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


JOBS = f"{SESSIONS}/namespaces/{NAMESPACE}/{names.RL_JOB_PLURAL}"


def older_chart(directory: Path) -> Path:
    """The chart of a release that knew neither `spec.pod` nor, of either kind, `status.recoveryCount`."""
    chart = directory / "everloop"
    shutil.copytree(CHART, chart)
    sessions, jobs = crd.training_session_crd(), crd.rl_job_crd()
    for document in (sessions, jobs):
        schema = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        del schema["properties"]["status"]["properties"]["recoveryCount"]
        name = f"{names.GROUP}_{document['spec']['names']['plural']}.yaml"
        (chart / "crds-src" / name).write_text(json.dumps(document))
    spec = sessions["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["pod"]
    spec["x-kubernetes-validations"] = [rule for rule in spec["x-kubernetes-validations"] if "pod" not in rule["rule"]]
    (chart / "crds-src" / f"{names.GROUP}_{names.TRAINING_SESSION_PLURAL}.yaml").write_text(json.dumps(sessions))
    return chart


def test_crds_live_with_the_release(helm: Helm, plane: ControlPlane, tmp_path: Path) -> None:
    """An upgrade brings new fields to objects that exist; uninstalled, they stay; installed again, all is as before."""
    kubeconfig = plane.write_kubeconfig(plane.directory / "admin.kubeconfig")

    def run(*arguments: str) -> None:
        done = helm.run(*arguments, "--namespace", RELEASE, "--kubeconfig", str(kubeconfig))
        assert done.returncode == 0, done.stderr

    def counted(path: str) -> int | None:
        """What is left of a count of recoveries that is written."""
        change = {"status": {"recoveryCount": 3}}
        return (api.merge(f"{path}/status", change).get("status") or {}).get("recoveryCount")

    def pod_of(body: dict[str, Any] | None) -> Any:
        return (body or {})["spec"].get("pod")

    with closing(Api(plane)) as api:
        run("install", "everloop", str(older_chart(tmp_path)), "--create-namespace")
        api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        eventually("the resource is served", lambda: api.request("GET", PATH).status_code == 200)
        uid = api.create(PATH, session_body("old"))["metadata"]["uid"]
        job = {**GOOD_JOBS[1], "metadata": {"name": "old"}}
        eventually("the other resource", lambda: api.request("POST", JOBS, job).status_code == 201)
        assert pod_of(api.get(f"{PATH}/old")) is None
        assert [counted(f"{path}/old") for path in (PATH, JOBS)] == [None, None]

        run("upgrade", "everloop", str(CHART))
        change = {"spec": {"pod": {"labels": {"team": "poems"}}}}
        stored = eventually("the new field", lambda: pod_of(api.merge(f"{PATH}/old", change)))
        assert (stored["labels"], stored["terminationGracePeriodSeconds"]) == ({"team": "poems"}, 120)
        for path in (PATH, JOBS):
            assert eventually("the new field of the status", partial(counted, f"{path}/old")) == 3

        run("uninstall", "everloop")
        assert api.get(f"/apis/apps/v1/namespaces/{RELEASE}/deployments/everloop-operator") is None
        kept = api.get(f"{PATH}/old")
        assert kept
        assert (kept["metadata"]["uid"], pod_of(kept)["labels"]) == (uid, {"team": "poems"})
        assert kept["status"]["recoveryCount"] == 3
        assert api.get(f"{JOBS}/old")

        run("install", "everloop", str(CHART))
        definition = api.get(CRD)
        assert definition
        assert definition["metadata"]["annotations"]["meta.helm.sh/release-name"] == "everloop"


def test_definitions_are_applied_without_a_difference(helm: Helm, plane: ControlPlane) -> None:
    """Whoever applies the rendered ones again changes nothing, and nothing of them is altered or dropped meanwhile."""
    definitions = [body for body in helm.template() if body["kind"] == "CustomResourceDefinition"]
    assert len(definitions) == 2
    kubeconfig = plane.write_kubeconfig(plane.directory / "gitops.kubeconfig")
    with closing(Api(plane)) as api:
        for body in definitions:
            assert "status" not in body
            text = json.dumps(body, separators=(",", ":"))
            assert len(text) < LARGEST_ANNOTATION
            path = f"{CRD.rpartition('/')[0]}/{body['metadata']['name']}"
            query = "?fieldManager=git&force=true"
            # Once it is served its conditions change no more.
            first, second = (apply(api, path + query, body) for _ in range(2))
            assert differences(body, second) == []
            assert first["metadata"]["generation"] == second["metadata"]["generation"]
            # The way that keeps all of it in an annotation works too.
            file = plane.directory / "definition.json"
            file.write_text(text)
            kubectl = [str(plane.directory / "kubectl"), "--kubeconfig", str(kubeconfig), "apply", "-f", str(file)]
            done = subprocess.run(kubectl, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


LARGEST_ANNOTATION = 262_144
"""What the annotations of an object may hold in all, in bytes."""


def apply(api: Api, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = api.request("PATCH", path, body, "application/apply-patch+yaml")
    assert answer.status_code in (200, 201), answer.text
    applied: dict[str, Any] = answer.json()
    return applied


def differences(wanted: Any, live: Any, where: str = "") -> list[str]:
    """Where what is wanted is not there as it is; what is there beside it counts for nothing."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return [d for key, value in wanted.items() for d in differences(value, live.get(key), f"{where}.{key}")]
    if isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        pairs = enumerate(zip(wanted, live, strict=True))
        return [d for number, (a, b) in pairs for d in differences(a, b, f"{where}[{number}]")]
    return [] if wanted == live else [f"{where}: {wanted!r} became {live!r}"]
