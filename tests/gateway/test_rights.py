"""The API server's audit log over what the gateway does with the chart's rights: none is missing, and none in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from devcluster.build import ensure_helm
from everloop_gateway.catalogue import session_name
from everloop_gateway.intents import intent_name
from everloop_operator.api import names
from tests.chart.conftest import Helm
from tests.gateway.world import (
    CATALOGUE,
    CLAIM,
    RELEASE_NAMESPACE,
    Cluster,
    GatewayProcess,
    Processes,
    Tenant,
    background,
    wait_for,
)
from tests.scale.audit import AuditLog, Entry

pytestmark = pytest.mark.slow

MODEL = "org/rights"
ENTRY: dict[str, Any] = {
    "name": MODEL,
    "source": {"claim": {"claimName": "models"}},
    "sessionTemplate": {"spec": {"storage": {"journal": {"claim": {"claimName": CLAIM}}}}},
}
ACCOUNT = f"system:serviceaccount:{RELEASE_NAMESPACE}:everloop-gateway"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
PATHS = {
    "ServiceAccount": "/api/v1/{}serviceaccounts",
    "Role": RBAC + "/{}roles",
    "RoleBinding": RBAC + "/{}rolebindings",
    "ClusterRole": RBAC + "/clusterroles",
    "ClusterRoleBinding": RBAC + "/clusterrolebindings",
}
Right = tuple[bool, str, str, str]
"""Whether it is one in the release namespace; API group, resource, verb."""


class Installation:
    """What the chart gives the gateway's service account."""

    def __init__(self, cluster: Cluster, team: Tenant, objects: list[dict[str, Any]]) -> None:
        self.cluster, self.team = cluster, team
        self.objects = [o for o in objects if o["kind"] in PATHS and "gateway" in o["metadata"]["name"]]

    @property
    def kubeconfig(self) -> Path:
        """With a token of the service account."""
        return self.cluster.directory / f"{self.team.namespace}.kubeconfig"

    def install(self) -> None:
        """Returns once the rights are in force."""
        for body in self.objects:
            self.cluster.api.call("POST", _path(body), body)
        account = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/serviceaccounts/everloop-gateway/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.cluster.api.call("POST", account, request)["status"]["token"]
        for right in (
            ("", "configmaps", RELEASE_NAMESPACE, "delete"),
            (names.GROUP, names.TRAINING_SESSION_PLURAL, self.team.namespace, "create"),
            ("authorization.k8s.io", "subjectaccessreviews", "", "create"),
        ):
            wait_for(f"{right}", partial(self.cluster.api.allowed, ACCOUNT, *right))
        self.cluster.plane.write_kubeconfig(self.kubeconfig, token)

    def remove(self) -> None:
        """Returns once the rights have ceased, or the next installation would take them for its own."""
        for body in self.objects:
            self.cluster.api.call("DELETE", f"{_path(body)}/{body['metadata']['name']}")
        right = (ACCOUNT, names.GROUP, names.TRAINING_SESSION_PLURAL, self.team.namespace)
        wait_for("the end of the rights", lambda: not self.cluster.api.allowed(*right))

    def granted(self) -> set[Right]:
        return {
            (body["metadata"].get("namespace") == RELEASE_NAMESPACE, group, resource, verb)
            for body in self.objects
            for rule in body.get("rules", ())
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }


def _path(body: dict[str, Any]) -> str:
    namespace = body["metadata"].get("namespace")
    return PATHS[body["kind"]].format(f"namespaces/{namespace}/" if namespace else "")


@pytest.fixture
def catalogue(cluster: Cluster) -> Iterator[list[dict[str, Any]]]:
    """One with a template."""
    entries = [*CATALOGUE, ENTRY]
    cluster.put_catalogue(entries)
    yield entries
    cluster.put_catalogue(CATALOGUE)


@pytest.fixture(params=["cluster", "namespaces"])
def installation(
    cluster: Cluster, catalogue: list[dict[str, Any]], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Installation]:
    """The chart's, for all namespaces or for one that is listed."""
    team = cluster.empty_tenant(session_name(MODEL, 1))
    listed = [team.namespace] if request.param == "namespaces" else []
    values = {"catalogue": catalogue, "operator": {"namespaces": listed}}
    installation = Installation(cluster, team, Helm(ensure_helm(), tmp_path).template(values, RELEASE_NAMESPACE))
    installation.install()
    yield installation
    installation.remove()


def use_everything(gateway: GatewayProcess, team: Tenant, processes: Processes, address: Callable[[], str]) -> None:
    """A session on demand, a model, a save while the session is idle, and a poll of what is not known."""
    key = team.cluster.key(team.namespace)
    with gateway.session(key) as (client, session_id):
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}
        creating = background(client.post, "/create_model", json=body)
        wait_for("the session", team.sessions)
        team.adopt()
        pod = team.start_pod(processes, address())
        team.serve(pod)
        assert creating.result(60).status_code == 200
        pod.kill()
        rest = {"state": "Idle", "since": "2030-01-01T00:00:00Z"}
        team.without_pod(names.PHASE_IDLE, names.REASON_IDLE, "nobody has used it", rest=rest)
        model = f"{session_id}:train:0"
        save = {"model_id": model, "seq_id": 1, "path": "kept"}
        request = client.post("/save_weights", json=save).json()  # kept, after a while
        team.serve(team.start_pod(processes, address()))
        assert client.post("/retrieve_future", json=request).status_code == 200
        assert client.post("/retrieve_future", json={"request_id": f"{model}:9"}).status_code == 410
        kept = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/configmaps/{intent_name(request['request_id'])}"
        wait_for("the end of what was kept", lambda: not team.cluster.api.exists(kept))


def used(call: Entry) -> Right:
    return call.namespace == RELEASE_NAMESPACE, call.group, call.resource, call.verb


def test_every_right_is_used_and_none_is_missing(
    cluster: Cluster, installation: Installation, processes: Processes, address: Callable[[], str]
) -> None:
    """The difference between what the chart grants and what is asked for is empty both ways, in either mode."""
    team, log = installation.team, AuditLog(cluster.plane.audit_log)
    # What other tests have left to be sent on is of namespaces that this installation does not serve.
    kept = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/configmaps?labelSelector={names.LABEL_TYPE}={names.TYPE_INTENT}"
    cluster.api.call("DELETE", kept)
    log.skip()
    create = [{"apiGroups": [names.GROUP], "resources": [names.TRAINING_SESSION_PLURAL], "verbs": ["create"]}]
    cluster.grant("someone", team.namespace, "trainer", create)
    where = (names.GROUP, names.TRAINING_SESSION_PLURAL, team.namespace)
    wait_for("the subject's right", lambda: cluster.api.allowed("someone", *where))
    environment = {"KUBECONFIG": str(installation.kubeconfig)}
    listed = [o for o in installation.objects if o["metadata"].get("namespace") == team.namespace]
    if listed:
        environment["EVERLOOP_NAMESPACES"] = team.namespace
    gateway = GatewayProcess(processes, cluster, address(), **environment)
    use_everything(gateway, team, processes, address)
    calls = [call for call in log.read(ACCOUNT) if call.resource]
    assert [str(call) for call in calls if call.code == 403] == []
    assert {used(call) for call in calls} == installation.granted()
    if listed:
        asked = {call.namespace for call in calls if call.resource != "subjectaccessreviews"}
        assert asked == {team.namespace, RELEASE_NAMESPACE}


def test_a_key_of_a_namespace_that_is_not_listed_is_told_so(
    cluster: Cluster, tenant: Tenant, processes: Processes, address: Callable[[], str]
) -> None:
    """At once, by the namespace's name: the gateway would wait in vain for rights there."""
    gateway = GatewayProcess(processes, cluster, address(), EVERLOOP_NAMESPACES="elsewhere")
    with gateway.client(cluster.key(tenant.namespace)) as client:
        said = f"its namespace '{tenant.namespace}' is none of those that this installation serves"
        answer = wait_for("the key", lambda: _said(client.post("/client/config"), said))
    assert answer.status_code == 401


def _said(answer: Any, text: str) -> Any:
    return answer if text in answer.text else None
