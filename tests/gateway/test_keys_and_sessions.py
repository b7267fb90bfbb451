"""Who is let in, and what belongs to whom: API keys and client sessions, against a real API server."""

from __future__ import annotations

from collections.abc import Callable

from tests.gateway.world import Cluster, GatewayProcess, Processes, SdkProcess, Tenant, wait_for

Start = Callable[..., SdkProcess]


def status(gateway: GatewayProcess, key: str) -> int:
    with gateway.client(key) as client:
        return client.post("/client/config", json={"sdk_version": "0"}).status_code


def test_a_wrong_key_is_the_sdks_authentication_error(gateway: GatewayProcess, sdk: Start) -> None:
    """The user sees AuthenticationError, and not a retry loop."""
    program = sdk(gateway.url, "tml-0123456789ab-" + "x" * 43, "models")
    error = program.wait("error")
    assert error["type"] == "AuthenticationError"
    assert "unknown or revoked API key" in error["message"]


def test_a_minted_key_works_once_applied_and_no_longer_once_deleted(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, sdk: Start
) -> None:
    """mint-key, kubectl apply, use it; delete the Secret, and it is dead."""
    key = cluster.mint_key(tenant.namespace, "--days", "7")
    assert status(gateway, key.text) == 401
    key.apply()
    wait_for("the key", lambda: status(gateway, key.text) == 200)
    program = sdk(gateway.url, key.text, "models")
    assert program.wait("models")["names"] == ["org/small"]
    key.revoke()
    wait_for("the revocation", lambda: status(gateway, key.text) == 401)
    log = gateway.log.read_text()
    assert key.text not in log
    assert key.text.split("-", 2)[2] not in log


def test_an_expired_key_is_refused_with_its_date(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """Expiry is looked at on every call."""
    key = cluster.mint_key(tenant.namespace)
    key.manifest["stringData"]["expires"] = "2020-01-01T00:00:00Z"
    key.apply()
    with gateway.client(key.text) as client:
        answer = wait_for("expiry", lambda: "expired at 2020" in client.post("/client/config").text)
    assert answer


def test_two_replicas_give_one_session_id(
    cluster: Cluster, processes: Processes, gateway: GatewayProcess, tenant: Tenant, address: Callable[[], str]
) -> None:
    """create_session repeated at another replica, after a lost answer, makes no second session."""
    other, key = GatewayProcess(processes, cluster, address()), cluster.key(tenant.namespace)
    ids = []
    for replica, repeat in ((gateway, "one"), (other, "one"), (other, "two")):
        with replica.session(key) as (client, _):
            answer = client.post("/create_session", json={}, headers={"X-Idempotency-Key": repeat})
            ids.append(answer.json()["session_id"])
    assert ids[0] == ids[1] != ids[2]
    with gateway.client(key) as client:
        assert client.post("/session_heartbeat", json={"session_id": ids[2]}).status_code == 200
        assert client.post(f"/sessions/{ids[2]}/finish", json={"reason": {"type": "success"}}).status_code == 200


def test_a_foreign_or_forged_session_id_is_refused_by_name(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant
) -> None:
    """Keys of one namespace do not reach each other's sessions, models or samplers."""
    mine, theirs = cluster.key(tenant.namespace), cluster.key(tenant.namespace)
    wait_for("the keys", lambda: status(gateway, mine) == status(gateway, theirs) == 200)
    with gateway.client(theirs) as client:
        foreign = client.post("/create_session", json={}).json()["session_id"]
    forged = foreign[:-1] + ("0" if foreign[-1] != "0" else "1")
    with gateway.client(mine) as client:
        for session_id in (foreign, forged, "nonsense"):
            calls = [
                client.post("/session_heartbeat", json={"session_id": session_id}),
                client.post(f"/sessions/{session_id}/finish", json={}),
                client.post(
                    "/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"}
                ),
                client.post(
                    "/create_sampling_session",
                    json={"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/small"},
                ),
            ]
            for answer in calls:
                assert answer.status_code == 403
                assert f"session_id '{session_id}'" in answer.json()["detail"]
        answer = client.post("/optim_step", json={"model_id": f"{foreign}:train:0", "seq_id": 1})
        assert (answer.status_code, "model_id" in answer.json()["detail"]) == (403, True)
        answer = client.post("/retrieve_future", json={"request_id": f"{foreign}:train:0:1"})
        assert (answer.status_code, "request_id" in answer.json()["detail"]) == (403, True)
    assert tenant.bindings() == []
