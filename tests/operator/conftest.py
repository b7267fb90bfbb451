"""One API server for all tests of the operator, and one operator process before it."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everloop_operator.cluster.rbac import NAMESPACE_RULES, NODE_RULES, RELEASE_RULES, Rule
from tests.operator import strangers
from tests.operator.control_plane import ControlPlane, running
from tests.operator.world import RELEASE, ROOT, Api, Operator, World, eventually, free_address

OPERATOR_TOKEN = "operator-token"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    directory = tmp_path_factory.mktemp("plane")
    with running(directory, (f"{OPERATOR_TOKEN},everloop-operator,2",), audit=True) as plane:
        yield plane


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Iterator[Api]:
    with installed_api(plane) as api:
        yield api


@contextmanager
def installed_api(plane: ControlPlane) -> Iterator[Api]:
    """The API server with the CRDs from `crds/`."""
    kubeconfig = plane.write_kubeconfig(plane.directory / "admin.kubeconfig")
    kubectl = [str(plane.directory / "kubectl"), "--kubeconfig", str(kubeconfig)]
    subprocess.run([*kubectl, "apply", "--server-side", "-f", str(ROOT / "crds")], check=True, capture_output=True)
    with closing(Api(plane)) as api:
        # Not `kubectl wait`, which fails on a definition whose conditions aren't written yet.
        for plural in ("trainingsessions", "rljobs"):
            path = f"/apis/everloop.dev/v1alpha1/{plural}"
            eventually(f"{plural} are served", partial(served, api, path))
        yield api


def served(api: Api, path: str) -> bool:
    return api.request("GET", path).status_code == 200


def grant(api: Api) -> None:
    """Gives the operator's user exactly what `rbac` lists."""

    def rules(listed: tuple[Rule, ...]) -> list[dict[str, Any]]:
        return [
            {
                "apiGroups": [rule.group],
                "resources": [rule.resource],
                "verbs": list(rule.verbs),
                **({"resourceNames": list(rule.names)} if rule.names else {}),
            }
            for rule in listed
        ]

    base = "/apis/rbac.authorization.k8s.io/v1"
    subject = {"kind": "User", "name": "everloop-operator", "apiGroup": "rbac.authorization.k8s.io"}

    def reference(kind: str) -> dict[str, Any]:
        return {"roleRef": {"kind": kind, "name": "operator", "apiGroup": subject["apiGroup"]}, "subjects": [subject]}

    metadata = {"metadata": {"name": "operator"}}
    api.create(f"{base}/clusterroles", {**metadata, "rules": rules((*NAMESPACE_RULES, *NODE_RULES))})
    api.create(f"{base}/clusterrolebindings", {**metadata, **reference("ClusterRole")})
    api.create("/api/v1/namespaces", {"metadata": {"name": RELEASE}})
    api.create(f"{base}/namespaces/{RELEASE}/roles", {**metadata, "rules": rules(RELEASE_RULES)})
    api.create(f"{base}/namespaces/{RELEASE}/rolebindings", {**metadata, **reference("Role")})


@pytest.fixture(scope="session")
def operator(plane: ControlPlane, api: Api) -> Iterator[Operator]:
    grant(api)
    strangers.pause(api)
    kubeconfig = plane.write_kubeconfig(plane.directory / "operator.kubeconfig", OPERATOR_TOKEN)
    operator = Operator(kubeconfig, plane.directory / "operator.log", free_address(1), EVERLOOP_METRICS="true")
    operator.start()
    yield operator
    assert operator.stop() == 0, operator.log.read_text()[-3000:]


@pytest.fixture
def world(api: Api, operator: Operator) -> Iterator[World]:
    number = next(_numbers)
    world = World(api, f"team-{number}", number)
    yield world
    world.close()


@pytest.fixture(scope="session")
def crds() -> Path:
    return ROOT / "crds"
