"""What others put into the cluster or on the wire costs the gateway, and those that it serves, nothing."""

from __future__ import annotations

from collections.abc import Callable

from everloop_gateway.ids import Stream
from everloop_operator.api import names
from tests.gateway.test_custom_losses import request as loss
from tests.gateway.world import Cluster, GatewayProcess, Processes, Tenant

JSON = {"content-type": "application/json"}


def test_a_foreign_config_map_is_no_binding(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """One that has a binding's name and not its content is like none."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        name = Stream(session_id, "train", 0).binding_name
        path = f"/api/v1/namespaces/{tenant.namespace}/configmaps"
        cluster.api.call("POST", path, {"metadata": {"name": name}})
        answer = client.post("/retrieve_future", json={"request_id": f"{session_id}:train:0:1"})
    assert answer.status_code == 410


def test_json_without_end_is_a_bad_request(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """A body nested deeper than a parser goes is refused like any that is no JSON."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, _):
        answer = client.post("/optim_step", content=b'{"a":' * 50_000, headers=JSON)
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["detail"]


def test_a_field_that_is_given_twice_is_refused(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """Wherever it stands: who reads the first value and who reads the last would mean different models."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        for body in (
            b'{"model_id": "%s:train:0", "model_id": "other"}' % session_id.encode(),
            b'{"adam_params": {"eps": 1, "eps": 2}}',
        ):
            answer = client.post("/optim_step", content=body, headers=JSON)
            assert (answer.status_code, "given more than once" in answer.json()["detail"]) == (400, True)


def test_a_parameter_that_is_given_twice_is_refused(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Callable[[], str]
) -> None:
    """Also with the same value, also in the address of a file; other parameters stay nobody's business."""
    tenant.serve(tenant.start_pod(processes, address()))
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        run = f"training_runs/{session_id}:train:0"
        file = f"downloads/{tenant.namespace}/{session_id}:train:0/weights/a/{'0' * 32}/archive.tar.gz"
        for path, name in (
            ("sessions", "limit"), ("checkpoints", "offset"), ("training_runs", "access_scope"),
            ("training_runs", "project_id"),
            (f"sessions/{session_id}", "access_scope"), (run, "access_scope"), (file, "expires"), (file, "mac"),
        ):  # fmt: skip
            answer = client.get(f"/{path}?{name}=1&other=2&{name}=1")
            assert (answer.status_code, answer.json()["detail"]) == (400, f"{name}: given more than once"), path
        assert client.get("/sessions?limit=1&other=2&other=3").status_code == 200


def test_nothing_is_promised_that_no_pod_takes(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Callable[[], str]
) -> None:
    """A save under a number that its pod would refuse is not kept for it while it is away, nor said to have ended."""
    tenant.serve(tenant.start_pod(processes, address()))
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "org/small", "lora_config": {"rank": 8}}
        client.post("/create_model", json=body)
        save = {"model_id": f"{session_id}:train:0", "path": "a"}
        tenant.recovering("its node is gone")
        for number in (0, -1, 2**63, "1", None):
            answer = client.post("/save_weights", json={**save, "seq_id": number})
            assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (400, "seq_id")
            sampling = {"model_id": save["model_id"], "sampling_session_seq_id": 1, "seq_id": number}
            assert client.post("/save_weights_for_sampler", json=sampling).status_code == 400
        assert [binding["data"]["id"] for binding in tenant.bindings()] == [save["model_id"]]
        rest = {"state": "Stopped", "since": "2030-01-01T00:00:00Z"}
        tenant.without_pod(names.PHASE_STOPPED, names.REASON_STOPPED, "spec.stop is true", rest=rest)
        for number in (-1, 2**63, "1"):
            answer = client.post("/optim_step", json={**save, "seq_id": number})
            assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (400, "seq_id")


def test_an_access_scope_is_one_wherever_it_is_taken(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Callable[[], str]
) -> None:
    """Of a session, too, of which both tell the same."""
    tenant.serve(tenant.start_pod(processes, address()))
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        for path in ("sessions", f"sessions/{session_id}", "training_runs", f"training_runs/{session_id}:train:0"):
            answer = client.get(f"/{path}", params={"access_scope": "null"})
            assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (400, "access_scope"), path


def test_a_body_that_is_of_another_call_is_refused(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """As a session pod refuses it, where the gateway answers by itself; nothing is bound."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/small"}
        right = {"create_sampling_session": sampling, "create_custom_loss": loss(session_id)}
        right |= {"create_session": {}, "session_heartbeat": {"session_id": session_id}}
        others: list[object] = ["save_weights", {}, None]
        for name, body in right.items():
            for kind in others:
                answer = client.post(f"/{name}", json={**body, "type": kind})
                assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (400, "type"), (name, kind)
    assert tenant.bindings() == []
