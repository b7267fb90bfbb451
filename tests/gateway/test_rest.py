"""Sessions that rest on purpose: what the unmodified SDK sees of a suspension and of a stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from everloop_operator.api import names
from tests.gateway.world import Cluster, GatewayProcess, Processes, SdkProcess, Tenant, background, wait_for

Start = Callable[..., SdkProcess]
Address = Callable[[], str]
SINCE = "2030-01-01T00:00:00Z"


def wake(tenant: Tenant) -> str:
    """Value of the annotation that wakes the tenant's session; empty if there is none."""
    metadata = tenant.cluster.api.call("GET", f"{tenant.path}/{tenant.session}")["metadata"]
    return str(metadata.get("annotations", {}).get(names.ANNOTATION_WAKE, ""))


def test_a_suspended_session_is_waited_for(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Calls are held, and wake nothing; resumed, everything goes on, and once."""
    key = cluster.key(tenant.namespace)
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, key, "train")
    program.wait("created")
    pod.kill()
    rest = {"state": "Suspended", "since": SINCE}
    tenant.without_pod(names.PHASE_SUSPENDED, names.REASON_SUSPENDED, "spec.suspend is true", rest=rest)
    program.say("step")
    gateway.wait_logged("call waits", f"{tenant.namespace}/small is Suspended: spec.suspend is true")
    assert (program.named("step"), wake(tenant)) == ([], "")
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("step")
    program.finish()
    assert set(Counter(tenant.accepted()).values()) == {1}


def test_every_call_to_a_stopped_session_ends_with_its_reason(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Operations under way, in chunks, and later ones: each raises the SDK's own error, and none hangs."""
    key = cluster.key(tenant.namespace)
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, key, "outcomes")
    program.wait("created")
    pod.mode("hold")
    program.say("step")
    wait_for("what is under way", lambda: len(tenant.accepted()) >= 6)
    rest = {"state": "Stopped", "since": SINCE}
    tenant.without_pod(names.PHASE_STOPPED, names.REASON_STOPPED, "spec.stop is true", rest=rest)
    pod.kill()
    under_way = program.wait("ended", 1, 60)
    program.say("step")
    later = program.wait("ended", 2, 60)
    for ended in (under_way, later):
        for call in ("forward", "update", "save"):
            assert ended[call].startswith("RequestFailedError: ")
        for call in ("forward", "update", "save", "sample"):
            assert f"TrainingSession {tenant.namespace}/small is Stopped: spec.stop is true" in ended[call]
    assert later["sample"].startswith("APIStatusError: ")
    program.finish()
    with gateway.session(key) as (client, session_id):
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "org/small", "lora_config": {"rank": 8}}
        refused = client.post("/create_model", json=body)
        assert refused.status_code == 400
        assert "is Stopped: spec.stop is true" in refused.json()["detail"]
        assert client.get("/get_server_capabilities").json() == {"supported_models": []}


def test_a_call_wakes_an_idle_session(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """A heartbeat sets no annotation, a call does, and goes on as soon as there is a pod."""
    key = cluster.key(tenant.namespace)
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, key, "train")
    model = program.wait("created")["model_id"]
    pod.kill()
    rest = {"state": "Idle", "since": SINCE}
    tenant.without_pod(names.PHASE_IDLE, names.REASON_IDLE, "nobody has used it", rest=rest)
    with gateway.client(key) as client:
        beat = client.post("/session_heartbeat", json={"session_id": model.partition(":")[0]})
    assert (beat.status_code, wake(tenant)) == (200, "")
    program.say("step")
    wait_for("the annotation", lambda: wake(tenant))
    gateway.wait_logged("session woken by a call", tenant.namespace)
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("step")
    program.finish()
    assert set(Counter(tenant.accepted()).values()) == {1}


def test_an_idle_session_may_refuse_to_be_woken(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address
) -> None:
    """Operations of its models wait with the reason; a new model is refused with it; the annotation is not set."""
    key = cluster.key(tenant.namespace)
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    with gateway.session(key) as (client, session_id):
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "org/small", "lora_config": {"rank": 8}}
        request_id = client.post("/create_model", json=body).json()["request_id"]
        change = {"spec": {"idle": {"onCall": "Refuse"}}}
        cluster.api.call("PATCH", f"{tenant.path}/{tenant.session}", change, "application/merge-patch+json")
        pod.kill()
        rest = {"state": "Idle", "since": SINCE}
        tenant.without_pod(names.PHASE_IDLE, names.REASON_IDLE, "nobody has used it", rest=rest)
        poll = background(client.post, "/retrieve_future", json={"request_id": request_id})
        refused = client.post("/create_model", json={**body, "model_seq_id": 1})
        assert refused.status_code == 400
        assert "is Idle: nobody has used it" in refused.json()["detail"]
        assert poll.result(60).json()["queue_state_reason"].endswith("is Idle: nobody has used it")
    assert wake(tenant) == ""
