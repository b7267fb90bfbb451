"""What the unmodified SDK does to a checkpoint, while the pod that has it is replaced."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx

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


def test_what_is_published_is_open_to_the_keys_of_the_namespace(
    cluster: Cluster, gateway: GatewayProcess, processes: Processes, address: Address
) -> None:
    """Sampling, loading, asking what it is and finding its run; not before, not afterwards, and nothing else of it."""
    tenant, stranger = cluster.tenant(), cluster.tenant()
    for each in (tenant, stranger):
        each.serve(each.start_pod(processes, address()))
    keys = [cluster.key(tenant.namespace), cluster.key(tenant.namespace), cluster.key(stranger.namespace)]
    with gateway.session(keys[0]) as (owner, session_id):
        run = f"{session_id}:train:0"
        owner.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        saved = owner.post("/save_weights", json={"model_id": run, "seq_id": 1, "path": "saved"}).json()
        path = owner.post("/retrieve_future", json=saved).json()["path"]
        publication = f"/training_runs/{run}/checkpoints/weights/saved/publish"
        with gateway.session(keys[1]) as reader, gateway.session(keys[2]) as outsider:
            assert statuses(*reader, path, 0) == statuses(*outsider, path, 0) == {403}
            assert reader[0].post(publication).status_code == 403
            assert owner.post(publication).status_code == 200
            assert statuses(*reader, path, 1) == {200}
            assert statuses(*reader, path.replace("saved", "other"), 2) == {403}
            assert statuses(*outsider, path, 2) == {403}
            shown = reader[0].get("/training_runs?access_scope=accessible").json()["training_runs"]
            (foreign,) = (each for each in shown if each["training_run_id"] == run)
            assert (foreign["model_owner"], foreign["user_metadata"]) == ("", None)
            assert reader[0].get(f"/training_runs/{run}?access_scope=accessible").json() == foreign
            assert run not in reader[0].get("/training_runs").text
            assert reader[0].get(f"/training_runs/{run}").status_code == 403
            assert reader[0].get("/training_runs?access_scope=all").status_code == 400
            assert run not in outsider[0].get("/training_runs?access_scope=accessible").text
            assert reader[0].delete(publication).status_code == 403
            assert owner.delete(publication).status_code == 200
            assert statuses(*reader, path, 3) == {403}
            assert run not in reader[0].get("/training_runs?access_scope=accessible").text


def statuses(client: httpx.Client, session_id: str, path: str, number: int) -> set[int]:
    """How the calls that read a checkpoint are answered."""
    sampling = {"session_id": session_id, "sampling_session_seq_id": number, "model_path": path}
    loading = {"session_id": session_id, "model_seq_id": number, "path": path, "optimizer": False}
    return {
        client.post("/create_sampling_session", json=sampling).status_code,
        client.post("/load_weights", json=loading).status_code,
        client.post("/weights_info", json={"tinker_path": path}).status_code,
    }


def changes(tenant: Tenant) -> list[dict[str, str]]:
    """What the pods were told to change."""
    return [record for record in tenant.ledger() if "changed" in record]
