"""API keys of RLJobs: what else they open, whom their checkpoints are open to, and a key that is brand new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from everloop_gateway import keys
from everloop_gateway.ids import Stream
from everloop_operator.api import names, tokens
from tests.gateway.world import (
    GATEWAY_TOKEN,
    MASTER,
    RELEASE_NAMESPACE,
    Cluster,
    GatewayProcess,
    Key,
    Processes,
    SdkProcess,
    Tenant,
    wait_for,
)
from tests.operator.faults.proxy import Call, Fault, Proxy

Start = Callable[..., SdkProcess]
Address = Callable[[], str]


@pytest.fixture
def serving(tenant: Tenant, processes: Processes, address: Address) -> Tenant:
    """A namespace whose session has a pod."""
    tenant.serve(tenant.start_pod(processes, address()))
    return tenant


def job_key(cluster: Cluster, namespace: str, uid: str, attempt: int = 1) -> Key:
    """The key of an attempt of a job, as the operator makes it; not applied yet."""
    text = tokens.job_key(bytes.fromhex(MASTER), uid, attempt)
    key = cluster.mint_key(namespace)
    key.manifest["metadata"]["name"] = keys.secret_name(keys.key_id_of(text))
    key.manifest["metadata"]["labels"][names.LABEL_JOB_UID] = uid
    key.manifest["stringData"] |= {"sha256": keys.digest(text), "session": "small"}
    return Key(cluster, text, key.manifest)


def model_of(client: httpx.Client, session_id: str) -> str:
    """A new model's id."""
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"}
    assert client.post("/create_model", json=body).status_code == 200
    return f"{session_id}:train:0"


def load(client: httpx.Client, session_id: str, path: str) -> int:
    """The status of creating a model from a checkpoint."""
    body = {"session_id": session_id, "model_seq_id": 7, "path": path, "optimizer": True}
    return client.post("/load_weights", json=body).status_code


def test_what_a_job_has_made_is_gone_on_from_with_a_persons_key(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant, sdk: Start
) -> None:
    """By the SDK, after the job's key is gone: a new model of the person's own, and sampling."""
    key = job_key(cluster, serving.namespace, f"uid-{serving.namespace}")
    key.apply()
    job = sdk(gateway.url, key.text, "train")
    job.wait("created")
    job.finish()
    path = job.named("saved")[0]["path"]
    key.revoke()
    person = cluster.key(serving.namespace)
    program = sdk(gateway.url, person, "resume", path)
    program.finish()
    assert program.named("loaded")[0]["path"] == path
    assert program.named("refused")
    model = program.named("created")[0]["model_id"]
    bound = {binding["data"]["id"]: binding["data"] for binding in serving.bindings()}
    assert (bound[model]["keyId"], "jobUID" in bound[model]) == (keys.key_id_of(person), False)
    with gateway.session(person) as (client, session_id):
        sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
        assert client.post("/create_sampling_session", json=sampler).status_code == 200


def test_nothing_else_of_a_job_is_open_and_to_nobody_else(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant
) -> None:
    """Not its model, nor its run; not to the key of another job, nor to another namespace's."""
    key = job_key(cluster, serving.namespace, f"uid-{serving.namespace}")
    key.apply()
    with gateway.session(key.text) as (client, session_id):
        model = model_of(client, session_id)
    path = f"tinker://{model}/weights/saved"
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        assert load(client, session_id, path) == 200
        for call, body in (
            ("/optim_step", {"model_id": model, "seq_id": 1}),
            ("/save_weights", {"model_id": model, "seq_id": 1, "path": "mine"}),
            ("/retrieve_future", {"request_id": f"{model}:0"}),
            ("/session_heartbeat", {"session_id": model.partition(":")[0]}),
        ):
            assert client.post(call, json=body).status_code == 403, call
        assert client.get(f"/training_runs/{model}").status_code == 403
    other = job_key(cluster, serving.namespace, "another-job")
    other.apply()
    for foreign in (other.text, cluster.key(cluster.tenant().namespace)):
        with gateway.session(foreign) as (client, session_id):
            assert load(client, session_id, path) == 403


def test_a_binding_that_somebody_has_written_opens_nothing(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant
) -> None:
    """A person's checkpoint stays closed to others, though a ConfigMap says that a job has made it."""
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        model_of(client, session_id)
    [binding] = serving.bindings()
    # Another model of that session, of which the gateway has nothing in its memory.
    model = Stream(session_id, "train", 1)
    data = {**binding["data"], "id": model.id, "jobUID": f"uid-{serving.namespace}"}
    forged = {"metadata": {"name": model.binding_name}, "data": data}
    cluster.api.call("POST", f"/api/v1/namespaces/{serving.namespace}/configmaps", forged)
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        assert load(client, session_id, f"tinker://{model.id}/weights/saved") == 403


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """Before the API server; it never answers the first watch of API keys."""
    proxy = Proxy(cluster.plane)
    proxy.spoil("", Call("GET", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/secrets?watch", 0), Fault.STALL_BEFORE)
    yield proxy
    proxy.close()


def test_a_replica_that_is_behind_opens_to_a_new_key_at_once(
    cluster: Cluster, proxy: Proxy, serving: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """The first call of a driver, of a job's first attempt and of its second, whose key takes the first one's place."""
    known, old, new = (job_key(cluster, serving.namespace, f"{serving.namespace}-{n}") for n in range(3))
    successor = job_key(cluster, serving.namespace, f"{serving.namespace}-0", 2)
    known.apply()
    config = replace(cluster.plane, server=proxy.address).write_kubeconfig(
        cluster.directory / "behind.kubeconfig", GATEWAY_TOKEN
    )
    replica = GatewayProcess(processes, cluster, address(), KUBECONFIG=str(config))
    wait_for("the watch that is never answered", lambda: "" in proxy.hit)
    try:
        secrets = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/secrets"
        assert status(replica, known) == [200] * 9
        assert status(replica, old) == [401] * 9
        assert len([call for call in proxy.calls[""] if call.path == secrets]) == 2, "the first list, and one question"
        new.apply()
        program = sdk(replica.url, new.text, "models")
        assert program.wait("models")["names"] == ["org/small"]
        secret = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/secrets/{known.manifest['metadata']['name']}"
        cluster.api.call("PUT", secret, successor.manifest)
        program = sdk(replica.url, successor.text, "models")
        assert program.wait("models")["names"] == ["org/small"]
    finally:
        processes.stop()


def test_a_secret_that_is_not_said_to_be_a_key_is_none(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant
) -> None:
    """Whatever its name and content are."""
    key = cluster.mint_key(serving.namespace)
    del key.manifest["metadata"]["labels"][names.LABEL_TYPE]
    key.apply()
    assert status(gateway, key) == [401] * 9


def status(gateway: GatewayProcess, key: Key) -> list[int]:
    """What several calls with a key are answered."""
    with gateway.client(key.text) as client:
        return [client.post("/client/config").status_code for _ in range(9)]
