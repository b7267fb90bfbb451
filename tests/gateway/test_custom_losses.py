"""Traced losses through the gateway: checked, told by an id that holds them, and of no use to other keys."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.world import Cluster, GatewayProcess, Tenant

INPUT = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
SUM = {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}]}
OUTPUT = {
    "op": "output",
    "name": "output",
    "target": "output",
    "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {"custom/all:sum": {"ref": "sum_1"}}}]}],
}


def request(session_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "custom_loss_seq_id": 0,
        "name": "total",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": [INPUT, SUM, OUTPUT]},
        "type": "create_custom_loss",
        **changes,
    }


def test_a_loss_is_told_by_its_id(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """Without a pod, and with nothing kept: a repeat gets the same id, and whoever polls it the loss."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        assert client.post("/client/config", json={}).json()["custom_loss_server_side"] is True
        promised = [client.post("/create_custom_loss", json=request(session_id)).json() for _ in range(2)]
        assert promised[0] == promised[1]
        told = client.post("/retrieve_future", json=promised[0])
        assert (told.status_code, told.json()["loss_id"]) == (200, promised[0]["request_id"])
        assert client.post("/cancel_future", json=promised[0]).status_code == 410
    assert tenant.bindings() == []


def test_a_loss_belongs_to_its_session(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """Another key can neither make one for it nor ask for it; what was cut off is no loss."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        promised = client.post("/create_custom_loss", json=request(session_id)).json()
        cut = {"request_id": promised["request_id"][:-5]}
        assert client.post("/retrieve_future", json=cut).status_code == 410
    with gateway.session(cluster.key(tenant.namespace)) as (other, _):
        for path, body in (("create_custom_loss", request(session_id)), ("retrieve_future", promised)):
            answer = other.post(f"/{path}", json=body)
            assert answer.status_code == 403, path
            assert "was not created with this API key" in answer.json()["detail"]


def test_a_loss_that_cannot_be_run_is_refused(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """When it is created, by node and operation; text that is no Unicode and nesting without end among it."""
    random = {**SUM, "op": "call_function", "target": "torch.rand_like"}
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"graph": {"format": 1, "nodes": [INPUT, random, OUTPUT]}},
            "graph.nodes[1] (sum_1): function torch.rand_like",
        ),
        ({"graph": {"format": 1, "nodes": [INPUT, {**SUM, "args": deep}, OUTPUT]}}, "nested too deeply"),
        ({"graph": {"format": 1, "nodes": [INPUT, {**SUM, "target": deep}, OUTPUT]}}, "target: must be a text"),
        ({"graph": {"format": 1, "nodes": [INPUT, {**SUM, "name": "\ud800"}, OUTPUT]}}, "name: must be a text"),
        ({"graph": {"format": 1, "nodes": [INPUT, {**SUM, "kwargs": {"\ud800": 1}}, OUTPUT]}}, "is no keyword"),
        ({"custom_loss_seq_id": -1}, "custom_loss_seq_id"),
        ({"name": "x" * 2**20}, "too large"),
    ]
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        for changes, detail in refused:
            body = json.dumps(request(session_id, **changes)).encode()
            answer = client.post("/create_custom_loss", content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, detail in answer.json()["detail"]) == (400, True), answer.text[:400]
