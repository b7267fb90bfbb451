"""Copies of checkpoints: which run holds one, who may copy what, and into which project."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.world import Cluster, GatewayProcess, Processes, SdkProcess, Tenant, wait_for

Start = Callable[..., SdkProcess]
Address = Callable[[], str]
KEY, TOKEN = "X-Idempotency-Key", "X-Tinker-Weights-Access-Token"


def copied(tenant: Tenant) -> list[str]:
    """The runs that the pods have made, one entry each time."""
    return [record["copied"] for record in tenant.ledger() if "copied" in record]


@pytest.fixture
def tenant_with_pod(cluster: Cluster, processes: Processes, address: Address) -> Tenant:
    """One that is served."""
    made = cluster.tenant()
    made.serve(made.start_pod(processes, address()))
    return made


@pytest.fixture
def owner(
    cluster: Cluster, gateway: GatewayProcess, tenant_with_pod: Tenant
) -> Iterator[tuple[httpx.Client, str, str]]:
    """A client, its session, and the path of its checkpoint."""
    with gateway.session(cluster.key(tenant_with_pod.namespace)) as (client, session_id):
        run = f"{session_id}:train:0"
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        saved = client.post("/save_weights", json={"model_id": run, "seq_id": 1, "path": "saved"}).json()
        yield client, session_id, client.post("/retrieve_future", json=saved).json()["path"]


def copy(client: httpx.Client, path: str, repeat: str, **body: Any) -> httpx.Response:
    """A call as the SDK makes it."""
    return client.post("/copy_weights", json={"source_path": path, **body}, headers={KEY: repeat})


def test_a_copy_that_a_killed_pod_made_is_the_one_that_is_answered(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """The pod dies between its record and its answer: the next is asked for the same run, which is made once."""
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, cluster.key(tenant.namespace), "copying")
    source = program.wait("saved")["path"]
    pod.mode("hold")
    program.say(tenant.namespace)
    wait_for("the copy", lambda: copied(tenant))
    pod.kill()
    tenant.recovering("its node is gone")
    tenant.serve(tenant.start_pod(processes, address()))
    path = program.wait("copied")["path"]
    model = program.wait("loaded")["model"]
    program.finish()
    (run,) = copied(tenant)
    assert path == f"tinker://{run}/weights/saved"
    asked = [record for record in tenant.ledger() if "asked_to_copy" in record]
    assert {each["pod"] for each in asked} > {pod.uid}
    assert {each["asked_to_copy"] for each in asked} == {run}
    assert {(each["body"]["source_path"], each["body"]["ttl_seconds"]) for each in asked} == {(source, 7200)}
    assert run in [binding["data"]["id"] for binding in tenant.bindings()]
    assert model != run


def test_the_run_follows_from_key_path_and_call(
    cluster: Cluster, gateway: GatewayProcess, tenant_with_pod: Tenant, owner: tuple[httpx.Client, str, str]
) -> None:
    """The same for a repeat, another for anything else; the older SDK names it, and its session has to be the key's."""
    (client, session_id, path), project = owner, {"destination_project_id": tenant_with_pod.namespace}
    first = copy(client, path, "r1", **project)
    assert first.status_code == 200, first.text
    assert copy(client, path, "r1", **project).json() == first.json()
    others = [copy(client, path, "r2", **project), copy(client, f"{path}-2", "r1", **project)]
    slot = {"session_id": session_id, "model_seq_id": 5}
    others += [copy(client, path, "r1", **slot), copy(client, path, "r3", **slot, **project)]
    told = [answer.json()["tinker_path"] for answer in others]
    assert told[2:] == [f"tinker://{session_id}:train:5/weights/saved"] * 2
    assert len({first.json()["tinker_path"], *told}) == len(copied(tenant_with_pod)) == 4
    session = first.json()["tinker_path"].removeprefix("tinker://").partition(":")[0]
    assert session != session_id
    assert client.post("/session_heartbeat", json={"session_id": session}).status_code == 200, "it is the key's own"
    with gateway.session(cluster.key(tenant_with_pod.namespace)) as (another, _):
        assert another.post("/session_heartbeat", json={"session_id": session}).status_code == 403
        assert copy(another, path, "r1", **slot).status_code == 403


def test_only_who_may_read_it_copies_it(
    cluster: Cluster,
    gateway: GatewayProcess,
    tenant_with_pod: Tenant,
    owner: tuple[httpx.Client, str, str],
    processes: Processes,
    address: Address,
) -> None:
    """What is published; not before, not afterwards but for a repeat, and never from another namespace."""
    client, session_id, path = owner
    stranger = cluster.tenant()
    stranger.serve(stranger.start_pod(processes, address()))
    publication = f"/training_runs/{session_id}:train:0/checkpoints/weights/saved/publish"
    mine, theirs = ({"destination_project_id": each.namespace} for each in (tenant_with_pod, stranger))
    with (
        gateway.session(cluster.key(tenant_with_pod.namespace)) as (reader, _),
        gateway.session(cluster.key(stranger.namespace)) as (outsider, _),
    ):
        assert copy(reader, path, "r1", **mine).status_code == 403
        assert client.post(publication).status_code == 200
        made = copy(reader, path, "r1", **mine)
        assert made.status_code == 200, made.text
        assert copy(outsider, path, "r1", **theirs).status_code == 403
        assert client.delete(publication).status_code == 200
        assert copy(reader, path, "r1", **mine).json() == made.json()
        assert copy(reader, path, "r2", **mine).status_code == 403
        run = made.json()["tinker_path"].removeprefix("tinker://").partition("/")[0]
        assert copy(client, made.json()["tinker_path"], "r1", **mine).status_code == 403, "it is the reader's alone"
        assert client.delete(f"/training_runs/{run}/checkpoints/weights/saved").status_code == 403
        assert reader.delete(f"/training_runs/{run}/checkpoints/weights/saved").status_code == 200
    assert copied(tenant_with_pod) == [run]
    assert copied(stranger) == []


def test_a_right_that_was_lost_before_the_pod_knew_of_it_is_lost(
    cluster: Cluster,
    gateway: GatewayProcess,
    tenant_with_pod: Tenant,
    owner: tuple[httpx.Client, str, str],
) -> None:
    """The run is bound, and the pod was never asked: it is told that this key may not read the source."""
    client, session_id, path = owner
    publication = f"/training_runs/{session_id}:train:0/checkpoints/weights/saved/publish"
    assert client.post(publication).status_code == 200
    with gateway.session(cluster.key(tenant_with_pod.namespace)) as (reader, own):
        slot = {"session_id": own, "model_seq_id": 3}
        bound = {**slot, "path": path, "optimizer": False}
        assert reader.post("/load_weights", json=bound).status_code == 200, "binds the same run"
        assert client.delete(publication).status_code == 200
        refused = copy(reader, path, "r1", **slot)
    assert refused.status_code == 404
    assert refused.json()["detail"].startswith("source_path")
    assert copied(tenant_with_pod) == []


def test_the_namespace_is_the_only_project(tenant_with_pod: Tenant, owner: tuple[httpx.Client, str, str]) -> None:
    """Its name is taken wherever a project may be named; any other is refused by its field, and nothing is made."""
    (client, session_id, path), own = owner, tenant_with_pod.namespace
    before = len(tenant_with_pod.bindings())
    slot = {"session_id": session_id, "model_seq_id": 5}
    refused = {
        "project_id": [
            client.post("/create_session", json={"project_id": "p"}),
            client.get("/training_runs?project_id=p"),
        ],
        "destination_project_id": [
            copy(client, path, "r1", destination_project_id="p"),
            copy(client, path, "r1", destination_project_id="p", **slot),
            copy(client, path, "r1", destination_project_id=3),
            copy(client, path, "r1"),
        ],
        "project_ids": [client.post("/sessions/search", json={"project_ids": ["p"]})],
        "source_path": [
            copy(client, "tinker://x/weights/y", "r1", destination_project_id=own),
            copy(client, "", "r1", destination_project_id=own),
        ],
        "model_seq_id": [copy(client, path, "r1", session_id=session_id)],
        TOKEN: [client.post("/copy_weights", json={"source_path": path, **slot}, headers={TOKEN: "t"})],
    }
    for field, answers in refused.items():
        for answer in answers:
            assert answer.status_code == 400, answer.text
            assert answer.json()["detail"].startswith(f"{field}: "), answer.text
    assert copied(tenant_with_pod) == []
    assert len(tenant_with_pod.bindings()) == before
    assert client.post("/create_session", json={"project_id": own}).status_code == 200
    assert client.get(f"/training_runs?project_id={own}").status_code == 200
    assert client.post("/sessions/search", json={"project_ids": [own]}).status_code == 200
