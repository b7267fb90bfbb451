"""Clients that take nothing of their answers hold no memory of the gateway, which all tenants share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from everloop_gateway.serve import MOST_UNTAKEN_BYTES as MOST_BYTES
from everloop_operator.api import names
from tests.gateway.fake_pod import LARGE
from tests.gateway.world import Cluster, GatewayProcess, Processes, Tenant
from tests.server.test_slow_readers import answered, resident, silent

SLACK = 96 << 20
"""Answers that are on their way."""
COUNT = MOST_BYTES // LARGE + 48


def test_clients_that_take_nothing_hold_no_memory(
    cluster: Cluster, tenant: Tenant, processes: Processes, address: Callable[[], str]
) -> None:
    """Many ask for a large result and never read it: together they hold as much as is allowed; others are answered."""
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    ip = address()
    gateway = GatewayProcess(processes, cluster, ip, log_level="INFO")
    key = cluster.key(tenant.namespace)
    with gateway.session(key) as (client, session), ExitStack() as stack:
        body = {"session_id": session, "model_seq_id": 0, "base_model": "org/small"}
        asked = {"request_id": client.post("/create_model", json=body).json()["request_id"]}
        pod.mode("large")
        assert len(client.post("/retrieve_future", json=asked).content) == LARGE
        before = resident(gateway.process.pid)
        content = b'{"request_id": "%s"}' % asked["request_id"].encode()
        head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {ip}\r\nX-API-Key: {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        place = (ip, names.GATEWAY_PORT)
        answered([stack.enter_context(silent(place, head.encode() + content)) for _ in range(COUNT)])
        held = resident(gateway.process.pid) - before
        assert held < MOST_BYTES + SLACK, f"{held >> 20} MiB for {COUNT} answers of {LARGE >> 20} MiB"
        assert client.post("/retrieve_future", json=asked).status_code == 200
    gateway.wait_logged("connection cut: its client does not take its answer", count=COUNT - MOST_BYTES // LARGE)
