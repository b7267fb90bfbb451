"""An installation for listed namespaces, without rights on nodes: real API server, chart and operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from everloop_operator.api import names
from tests.chart.conftest import Helm
from tests.operator.control_plane import ControlPlane, running
from tests.operator.faults.journeys import JobJourney
from tests.operator.world import RELEASE, SESSIONS, Api, Operator, World, eventually, free_address, session_body
from tests.scale.audit import AuditLog, Entry

TEAM, STRANGER = "team-listed", "team-unlisted"
ACCOUNT = f"system:serviceaccount:{RELEASE}:everloop-operator"
PATHS = {
    "ServiceAccount": "/api/v1/{}serviceaccounts",
    "ConfigMap": "/api/v1/{}configmaps",
    "Service": "/api/v1/{}services",
    "Pod": "/api/v1/{}pods",
    "Deployment": "/apis/apps/v1/{}deployments",
    "PodDisruptionBudget": "/apis/policy/v1/{}poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/{}networkpolicies",
    "Ingress": "/apis/networking.k8s.io/v1/{}ingresses",
    "Role": "/apis/rbac.authorization.k8s.io/v1/{}roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/{}rolebindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/{}clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/{}clusterrolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/{}validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/{}validatingadmissionpolicybindings",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/{}customresourcedefinitions",
}
VALUES: dict[str, Any] = {
    "operator": {"namespaces": [TEAM], "nodes": False},
    "ingress": {"enabled": True, "host": "everloop.example.com", "tlsSecretName": "tls"},
}


def path_of(body: dict[str, Any]) -> str:
    namespace = body["metadata"].get("namespace")
    return PATHS[body["kind"]].format(f"namespaces/{namespace}/" if namespace else "")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with running(tmp_path_factory.mktemp("plane"), audit=True) as plane:
        yield plane


@pytest.fixture(scope="module")
def world(plane: ControlPlane, helm: Helm) -> Iterator[World]:
    """The listed namespace, on an API server that has accepted all that the chart renders, under strict validation."""
    with closing(Api(plane)) as api:
        for namespace in (RELEASE, STRANGER):
            api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        world = World(api, TEAM, 99)
        for body in helm.template(VALUES):
            api.create(f"{path_of(body)}?fieldValidation=Strict", body)
        path = f"{SESSIONS}/{names.TRAINING_SESSION_PLURAL}"
        eventually("the resource is served", lambda: api.request("GET", path).status_code == 200)
        world.claims()
        yield world
        world.close()


@pytest.fixture(scope="module")
def operator(plane: ControlPlane, world: World) -> Iterator[Operator]:
    """The operator with the token of its service account, and so with the rights that the chart gives it."""
    account = f"/api/v1/namespaces/{RELEASE}/serviceaccounts/everloop-operator/token"
    token = world.api.create(account, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
    kubeconfig = plane.write_kubeconfig(plane.directory / "operator.kubeconfig", token["status"]["token"])
    log = plane.directory / "operator.log"
    scope = {"EVERLOOP_NAMESPACES": TEAM, "EVERLOOP_WATCH_NODES": "false"}
    operator = Operator(kubeconfig, log, free_address(3), **scope)
    operator.start()
    yield operator
    assert operator.stop() == 0, log.read_text()[-3000:]


def calls_of_the_operator(plane: ControlPlane) -> list[Entry]:
    """What it has asked the API server for, discovery aside."""
    return [call for call in AuditLog(plane.audit_log).read(ACCOUNT) if call.resource]


def test_a_session_lives_and_recovers_in_a_listed_namespace(
    plane: ControlPlane, world: World, operator: Operator
) -> None:
    """From creation over an eviction and a restart of the operator to its end, without one refused request."""
    world.create_session(pod={"disruptionBudget": True})
    world.run_pod("tuned-a1-0", world.node("a"))
    world.wait_phase(names.PHASE_RUNNING)
    condition = world.condition(names.CONDITION_NODES_HEALTHY)
    assert (condition["status"], condition["reason"]) == ("Unknown", names.REASON_NODES_NOT_WATCHED)
    pod = world.wait_pod("tuned-a1-0")
    [*_, first, second] = [t for t in pod["spec"]["tolerations"] if t["effect"] == "NoExecute"]
    assert (first["tolerationSeconds"], second["tolerationSeconds"]) == (1, 1)
    world.api.delete(world.path("pods", "tuned-a1-0"))  # as the taint manager would, once the node is lost
    world.run_pod("tuned-a2-0", world.node("b"))
    world.wait_phase(names.PHASE_RUNNING)
    assert world.status()["attempt"] == 2
    assert operator.stop() == 0
    world.remove_pod("tuned-a2-0")
    operator.start()
    world.run_pod("tuned-a3-0", world.node("c"))
    world.wait_phase(names.PHASE_RUNNING)
    world.api.delete(f"{world.sessions_path}/tuned")
    assert [str(call) for call in calls_of_the_operator(plane) if call.code == 403] == []


def test_a_job_runs_in_a_listed_namespace(plane: ControlPlane, world: World, operator: Operator) -> None:
    """Its API key is written to the release namespace, which is not listed, and goes with the job."""
    job = JobJourney(world)
    job.create()
    job.play(1, world.node("d"))
    assert len(job.keys()) == 1
    job.end()
    assert [str(call) for call in calls_of_the_operator(plane) if call.code == 403] == []


def test_other_namespaces_are_not_looked_at(plane: ControlPlane, world: World, operator: Operator) -> None:
    """A session of a namespace that is not listed gets no status, and no pod, and nobody asks for it."""
    api, strangers = world.api, f"{SESSIONS}/namespaces/{STRANGER}/{names.TRAINING_SESSION_PLURAL}"
    api.create(strangers, session_body("foreign"))
    world.create_session("own")
    eventually("a status", lambda: world.status("own"))
    foreign = api.get(f"{strangers}/foreign")
    assert foreign
    assert "status" not in foreign
    assert api.items(f"/api/v1/namespaces/{STRANGER}/pods") == []
    assert {call.namespace for call in calls_of_the_operator(plane)} == {TEAM, RELEASE}
    assert operator.alive()
