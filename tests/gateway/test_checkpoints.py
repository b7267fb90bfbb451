"""What the unmodified SDK does to a checkpoint, while the pod that has it is replaced."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.gateway.world import Cluster, GatewayProcess, Processes, SdkProcess, Tenant, wait_for

Start = Callable[..., SdkProcess]
Address = Callable[[], str]


def test_a_change_reaches_the_next_pod_as_the_same_call(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Method, path, body; and sent again after a kill, with the key by which the pod knows it."""
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, cluster.key(tenant.namespace), "housekeeping")
    run = program.wait("saved")["path"].split("/")[2]
    program.wait("expires")
    pod.mode("hold")
    program.say("go on")
    wait_for("the removal", lambda: len(changes(tenant)) == 2)
    pod.kill()
    tenant.recovering("its node is gone")
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("removed")
    program.finish()
    expires, first, again = changes(tenant)
    one = f"{run}/checkpoints/weights/saved"
    assert (expires["method"], expires["changed"], json.loads(expires["body"])) == (
        "PUT",
        f"{one}/ttl",
        {"ttl_seconds": 7200},
    )
    assert (first["method"], first["changed"], first["pod"]) == ("DELETE", one, pod.uid)
    assert (again["method"], again["changed"], again["repeat"]) == ("DELETE", one, first["repeat"])
    assert again["pod"] != pod.uid
    assert first["repeat"] not in (None, "", expires["repeat"])


def test_paths_that_are_no_checkpoints_lead_nowhere(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address
) -> None:
    """Kinds and names that no save can have, also written with dots: 404, and the pod is not asked."""
    tenant.serve(tenant.start_pod(processes, address()))
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        for tail in (
            "snapshots/1-2",
            "weights/..",
            "weights/%2e%2e",
            "weights/.hidden",
            "weights/a%20b",
            "weights/a/b",
        ):
            answer = client.delete(f"/training_runs/{session_id}:train:0/checkpoints/{tail}")
            assert answer.status_code == 404, (tail, answer.text)
    assert changes(tenant) == []


def changes(tenant: Tenant) -> list[dict[str, str]]:
    """What the pods were told to change."""
    return [record for record in tenant.ledger() if "changed" in record]
