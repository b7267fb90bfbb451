"""TrainingSessions made because a client asked for their base model: by the real rights, through kills and races."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from everloop_gateway.catalogue import session_name
from everloop_operator.api import names
from tests.gateway.world import (
    CATALOGUE,
    CLAIM,
    GATEWAY_USER,
    Cluster,
    GatewayProcess,
    Processes,
    SdkProcess,
    Tenant,
    background,
    wait_for,
)

Start = Callable[..., SdkProcess]
Address = Callable[[], str]
Team = Callable[..., Tenant]

REVIEWS = ("authorization.k8s.io", "subjectaccessreviews")
CREATE_SESSIONS = [
    {"apiGroups": [names.GROUP], "resources": [names.TRAINING_SESSION_PLURAL], "verbs": ["create"]},
]
SOURCE = {"claim": {"claimName": "models", "path": "small"}}
SPEC: dict[str, Any] = {"adapters": {"maxModels": 1}, "storage": {"journal": {"claim": {"claimName": CLAIM}}}}
TEMPLATE: dict[str, Any] = {"metadata": {"labels": {"team": "x"}}, "spec": SPEC}
ONE, PAIR = "org/one", "org/pair"
ENTRIES: list[dict[str, Any]] = [
    *CATALOGUE,
    {"name": ONE, "aliases": ["one"], "source": SOURCE, "sessionTemplate": TEMPLATE},
    {"name": PAIR, "source": SOURCE, "sessionTemplate": TEMPLATE, "limit": 2},
    {"name": "org/elsewhere", "source": SOURCE, "sessionTemplate": TEMPLATE, "namespaces": ["team-elsewhere"]},
    {"name": "org/typo", "source": SOURCE, "sessionTemplate": {"spec": {**SPEC, "adapter": {}}}},
    {"name": "org/wrong", "source": SOURCE, "sessionTemplate": {"spec": {**SPEC, "adapters": {"maxRank": 0}}}},
]


@pytest.fixture(scope="module", autouse=True)
def _catalogue(cluster: Cluster, gateway: GatewayProcess) -> Iterator[None]:
    """Templates and the rights for them, given to a gateway that runs already."""
    cluster.grant(
        GATEWAY_USER,
        "",
        "gateway-sessions",
        [*CREATE_SESSIONS, {"apiGroups": [REVIEWS[0]], "resources": [REVIEWS[1]], "verbs": ["create"]}],
    )
    cluster.put_catalogue(ENTRIES)
    with gateway.client(cluster.key(cluster.namespace("team-of-the-catalogue"))) as client:
        wait_for("the catalogue", lambda: ONE in client.get("/get_server_capabilities").text)
    yield
    cluster.put_catalogue(CATALOGUE)


@pytest.fixture
def team(cluster: Cluster) -> Team:
    """Makes namespaces without a TrainingSession, whose keys' subject may create some."""

    def make(allowed: bool = True, base_model: str = ONE) -> Tenant:
        tenant = cluster.empty_tenant(session_name(base_model, 1))
        if allowed:
            cluster.grant("someone", tenant.namespace, "trainer", CREATE_SESSIONS)
            where = (names.GROUP, names.TRAINING_SESSION_PLURAL, tenant.namespace)
            wait_for("the subject's right", lambda: cluster.api.allowed("someone", *where))
        return tenant

    return make


def session_names(tenant: Tenant) -> list[str]:
    return sorted(session["metadata"]["name"] for session in tenant.sessions())


def new_model(client: httpx.Client, session_id: str, base_model: str, number: int) -> httpx.Response:
    """Answered once the session has a pod."""
    body = {"session_id": session_id, "model_seq_id": number, "base_model": base_model}
    return client.post("/create_model", json=body)


def new_sampler(client: httpx.Client, session_id: str, base_model: str) -> httpx.Response:
    """Answered once it is bound."""
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": base_model}
    return client.post("/create_sampling_session", json=body)


def test_a_namespace_without_a_session_trains(
    cluster: Cluster, gateway: GatewayProcess, team: Team, processes: Processes, address: Address, sdk: Start
) -> None:
    """The SDK's call is held from before there is a session until its pod serves; then the loop goes on."""
    tenant = team()
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train", "one")
    (made,) = wait_for("the session", tenant.sessions)
    gateway.wait_logged("call held", f"{tenant.namespace}/{tenant.session}")
    assert program.events == []
    metadata, spec = made["metadata"], made["spec"]
    assert metadata["name"] == tenant.session
    assert metadata["labels"] == {"team": "x", names.LABEL_CREATED_BY: "gateway", names.LABEL_MANAGED_BY: "everloop"}
    assert {entry["manager"] for entry in metadata["managedFields"]} == {names.GATEWAY_FIELD_MANAGER}
    assert spec["baseModel"] == {"name": ONE, "revision": "", "source": SOURCE}
    assert spec["adapters"]["maxModels"] == 1
    assert spec["storage"]["journal"] == {"claim": {"claimName": CLAIM, "subPath": ""}}
    tenant.adopt()
    tenant.serve(tenant.start_pod(processes, address()))
    model = program.wait("created")["model_id"]
    program.say("step")
    program.wait("step")
    program.finish()
    assert tenant.accepted() == [f"{model}:{number}" for number in range(4)]
    (binding,) = tenant.bindings()
    assert (binding["data"]["session"], binding["data"]["uid"]) == (tenant.session, metadata["uid"])
    assert session_names(tenant) == [tenant.session]


def test_a_sampling_session_makes_one_too(cluster: Cluster, gateway: GatewayProcess, team: Team) -> None:
    """It needs no pod, but a TrainingSession to be bound to, whose claim the operator has found."""
    tenant = team()
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        creating = background(new_sampler, client, session_id, ONE)
        gateway.wait_logged("call waits", f"{tenant.namespace}/{tenant.session} is new")
        assert tenant.bindings() == []
        tenant.adopt()
        assert creating.result(30).status_code == 200
    assert session_names(tenant) == [tenant.session]
    assert [binding["data"]["session"] for binding in tenant.bindings()] == [tenant.session]


def test_a_subject_without_the_right_is_told_so_by_the_sdk(
    cluster: Cluster, gateway: GatewayProcess, team: Team, sdk: Start
) -> None:
    """The gateway's own right to create is not lent to those who have none."""
    tenant = team(allowed=False)
    error = sdk(gateway.url, cluster.key(tenant.namespace), "train", ONE).wait("error")
    assert error["type"] == "PermissionDeniedError"
    right = f"must not create {names.TRAINING_SESSION_PLURAL}.{names.GROUP} in namespace '{tenant.namespace}'"
    assert f"subject 'someone' {right}" in error["message"]
    assert (tenant.sessions(), tenant.bindings()) == ([], [])


def test_a_denial_that_passes_is_not_told(cluster: Cluster, gateway: GatewayProcess, team: Team) -> None:
    """An API server that has just begun denies what it grants a moment later; the call waits for that."""
    tenant = team(allowed=False)
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        creating = background(new_sampler, client, session_id, ONE)
        gateway.wait_logged("call waits", f"in namespace '{tenant.namespace}'")
        cluster.grant("someone", tenant.namespace, "trainer", CREATE_SESSIONS)
        wait_for("the session", tenant.sessions)
        tenant.adopt()
        assert creating.result(30).status_code == 200


@pytest.mark.parametrize(
    ("base_model", "words"),
    [
        ("org/elsewhere", "no TrainingSession in namespace"),
        ("org/typo", 'unknown field "spec.adapter"'),
        ("org/wrong", "spec.adapters.maxRank"),
    ],
)
def test_what_the_catalogue_cannot_give_is_a_bad_request(
    cluster: Cluster, gateway: GatewayProcess, team: Team, sdk: Start, base_model: str, words: str
) -> None:
    """Another namespace's entry, and templates with a field that is unknown or wrong: each says which."""
    tenant = team(base_model=base_model)
    error = sdk(gateway.url, cluster.key(tenant.namespace), "train", base_model).wait("error")
    assert error["type"] == "BadRequestError"
    # The SDK shows the answer as a Python value, whose quotes may be escaped.
    message = error["message"].replace("\\", "")
    assert f"base_model '{base_model}'" in message
    assert words in message
    assert (tenant.sessions(), tenant.bindings()) == ([], [])


def test_a_spent_quota_is_told_and_not_waited_for(cluster: Cluster, gateway: GatewayProcess, team: Team) -> None:
    """The API server's own words reach the client, though it answers like one that refuses the gateway."""
    tenant = team()
    path = f"/api/v1/namespaces/{tenant.namespace}/resourcequotas"
    hard = {"count/trainingsessions.everloop.dev": "0"}
    cluster.api.call("POST", path, {"metadata": {"name": "none"}, "spec": {"hard": hard}})
    status = {"status": {"hard": hard, "used": hard}}
    cluster.api.call("PATCH", f"{path}/none/status", status, "application/merge-patch+json")
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        answer = new_sampler(client, session_id, ONE)
        assert answer.status_code == 403
    assert "exceeded quota: none" in answer.json()["detail"]
    assert tenant.sessions() == []


def test_a_full_session_gets_a_sister_up_to_the_limit(
    cluster: Cluster, gateway: GatewayProcess, team: Team, processes: Processes, address: Address
) -> None:
    """One model each: the second makes the second session, the third is refused and says what is full."""
    first = team(base_model=PAIR)
    second = Tenant(cluster, first.namespace, session_name(PAIR, 2))
    with gateway.session(cluster.key(first.namespace)) as (client, session_id):
        for number, tenant in enumerate((first, second)):
            creating = background(new_model, client, session_id, PAIR, number)
            wait_for("the session", tenant.exists)
            tenant.adopt()
            # Full from the moment that it serves, so that the gateway knows it when it answers.
            tenant.serve(tenant.start_pod(processes, address()), modelCount=1)
            assert creating.result(30).json() == {"request_id": f"{session_id}:train:{number}:0"}
        answer = new_model(client, session_id, PAIR, 2)
        assert answer.status_code == 400
        for name in (first.session, second.session):
            assert f"{first.namespace}/{name} has 1 of 1 models (spec.adapters.maxModels)" in answer.json()["detail"]
        assert new_sampler(client, session_id, PAIR).status_code == 200
    assert session_names(first) == sorted([first.session, second.session])
    bound = {binding["data"]["id"]: binding["data"]["session"] for binding in first.bindings()}
    assert (bound[f"{session_id}:train:0"], bound[f"{session_id}:train:1"]) == (first.session, second.session)


def test_somebody_elses_session_under_the_derived_name_is_left_alone(
    cluster: Cluster, gateway: GatewayProcess, team: Team
) -> None:
    """One that serves the base model is used like any; one that serves another stands in the way, and is named."""
    tenants = [team(), team()]
    for tenant, base_model in zip(tenants, (ONE, "org/other"), strict=True):
        tenant.create_session(tenant.session, base_model)
        with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
            answer = new_sampler(client, session_id, ONE)
        assert answer.status_code == (200 if base_model == ONE else 400)
        (only,) = tenant.sessions()
        assert (only["metadata"]["uid"], only["metadata"]["generation"]) == (tenant.uid, 1)
    assert tenants[0].bindings()[0]["data"]["uid"] == tenants[0].uid
    assert f"{tenants[1].session} has the name that would be given, and serves org/other" in answer.json()["detail"]


def test_two_replicas_that_create_at_the_same_moment_meet_in_one_session(
    cluster: Cluster, gateway: GatewayProcess, team: Team, processes: Processes, address: Address
) -> None:
    """Both have decided to create before either could: one does, the other finds the name taken and adopts it."""
    tenant = team()
    replicas = [gateway, GatewayProcess(processes, cluster, address())]
    key = cluster.key(tenant.namespace)
    with replicas[0].session(key) as (first, session_id), replicas[1].session(key) as (second, other_id):
        earlier = [len(replica.logged("Kubernetes API refuses the gateway")) for replica in replicas]
        with cluster.withheld("gateway-sessions", *REVIEWS, tenant.namespace):
            calls = [
                background(new_sampler, first, session_id, ONE),
                background(new_sampler, second, other_id, ONE),
            ]
            for replica, count in zip(replicas, earlier, strict=True):
                replica.wait_logged("Kubernetes API refuses the gateway", "subjectaccessreviews", count + 1)
            assert tenant.sessions() == []
        wait_for("the session", tenant.exists)
        tenant.adopt()
        assert [call.result(30).status_code for call in calls] == [200, 200]
    (made,) = tenant.sessions()
    assert {binding["data"]["uid"] for binding in tenant.bindings()} == {made["metadata"]["uid"]}
    for event in ("session created", "session was created by another"):
        assert sum(len(replica.logged(event, tenant.namespace)) for replica in replicas) == 1, event


def test_a_gateway_killed_between_session_and_binding_has_a_successor_that_binds(
    cluster: Cluster, team: Team, processes: Processes, address: Address, sdk: Start
) -> None:
    """SIGKILL once the session is there and its binding cannot be: the repeat finds it and makes no other."""
    tenant = team()
    gateway = GatewayProcess(processes, cluster, address())
    with cluster.withheld("gateway", "", "configmaps", tenant.namespace):
        program = sdk(gateway.url, cluster.key(tenant.namespace), "train", ONE)
        (made,) = wait_for("the session", tenant.sessions)
        tenant.adopt()
        gateway.wait_logged("Kubernetes API refuses the gateway", "configmaps")
        kill(gateway.process)
        assert tenant.bindings() == []
    gateway.start()
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("created", seconds=60)
    program.finish()
    assert [session["metadata"]["uid"] for session in tenant.sessions()] == [made["metadata"]["uid"]]
    assert [binding["data"]["uid"] for binding in tenant.bindings()] == [made["metadata"]["uid"]]


def test_a_gateway_killed_between_binding_and_answer_has_a_successor_that_answers(
    cluster: Cluster, gateway: GatewayProcess, team: Team, processes: Processes, address: Address
) -> None:
    """SIGKILL while the call waits for the pod: another replica answers the repeat from the same binding."""
    tenant = team()
    victim = GatewayProcess(processes, cluster, address())
    key = cluster.key(tenant.namespace)
    with victim.session(key) as (client, session_id):
        broken = background(new_model, client, session_id, ONE, 0)
        wait_for("the session", tenant.exists)
        tenant.adopt()
        (bound,) = wait_for("the binding", tenant.bindings)
        kill(victim.process)
        assert isinstance(broken.exception(10), httpx.TransportError)
    with gateway.client(key) as client:
        repeat = background(new_model, client, session_id, ONE, 0)
        gateway.wait_logged("call waits", f"{tenant.namespace}/{tenant.session}")
        tenant.serve(tenant.start_pod(processes, address()))
        assert repeat.result(30).json() == {"request_id": f"{session_id}:train:0:0"}
    assert tenant.accepted() == [f"{session_id}:train:0:0"]
    assert [binding["metadata"]["uid"] for binding in tenant.bindings()] == [bound["metadata"]["uid"]]
    assert session_names(tenant) == [tenant.session]


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
