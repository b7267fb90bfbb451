"""Sessions that rest on purpose: what the unmodified SDK sees of a suspension and of a stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from everloop_operator.api import names
from tests.gateway.world import Cluster, GatewayProcess, Processes, SdkProcess, Tenant, background, wait_for

Start = Callable[..., SdkProcess]
Address = Callable[[], str]
SINCE = "2030-01-01T00:00:00Z"


def test_a_suspended_session_is_waited_for(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Polls say why nothing goes on, submits are held; resumed, everything goes on, and once."""
    key = cluster.key(tenant.namespace)
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, key, "train")
    model = program.wait("created")["model_id"]
    pod.kill()
    rest = {"state": "Suspended", "since": SINCE}
    tenant.without_pod(names.PHASE_SUSPENDED, names.REASON_SUSPENDED, "spec.suspend is true", rest=rest)
    program.say("step")
    with gateway.client(key) as client:
        poll = background(client.post, "/retrieve_future", json={"request_id": f"{model}:0"}).result(60)
    assert (poll.status_code, poll.json()["queue_state"]) == (408, "paused_capacity")
    assert poll.json()["queue_state_reason"].endswith("is Suspended: spec.suspend is true")
    assert program.named("step") == []
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
