"""What others put into the cluster or on the wire costs the gateway, and those that it serves, nothing."""

from __future__ import annotations

from everloop_gateway.ids import Stream
from tests.gateway.world import Cluster, GatewayProcess, Tenant


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
        headers = {"content-type": "application/json"}
        answer = client.post("/optim_step", content=b'{"a":' * 100_000, headers=headers)
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["detail"]
