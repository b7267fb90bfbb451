"""TrainingSessions that are deleted and created again: loops follow the storage, whichever replica serves them."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from everloop_operator.api import names
from tests.gateway.world import Cluster, GatewayProcess, Processes, SdkProcess, Tenant, background, wait_for

Start = Callable[..., SdkProcess]
Address = Callable[[], str]
Begin = Callable[[bool], tuple[GatewayProcess, SdkProcess, str]]

early_or_late = pytest.mark.parametrize("early", [True, False], ids=["bound-before-a-pod", "bound-to-a-lineage"])


@pytest.fixture
def begin(cluster: Cluster, tenant: Tenant, processes: Processes, address: Address, sdk: Start) -> Begin:
    """A gateway, an SDK program whose model was bound before the first pod (early) or later, and the key."""

    def begin(early: bool) -> tuple[GatewayProcess, SdkProcess, str]:
        gateway, key = GatewayProcess(processes, cluster, address()), cluster.key(tenant.namespace)
        pod = tenant.start_pod(processes, address())
        if not early:
            tenant.serve(pod)
        program = sdk(gateway.url, key, "train")
        (binding,) = wait_for("the binding", tenant.bindings)
        assert ("lineage" in binding["data"]) is not early
        if early:
            gateway.wait_logged("call waits", tenant.session)
            tenant.serve(pod)
        program.wait("created")
        return gateway, program, key

    return begin


def lineages(tenant: Tenant) -> list[str]:
    """Those recorded for bindings that were written without."""
    return [record["data"]["lineage"] for record in tenant.bindings(names.TYPE_LINEAGE)]


def restart(gateway: GatewayProcess) -> None:
    """SIGKILL; what starts in its place knows nothing but what the API server knows."""
    gateway.process.kill()
    gateway.process.wait()
    gateway.start()


@early_or_late
def test_a_loop_follows_its_storage_through_a_replica_that_never_saw_it(
    tenant: Tenant, processes: Processes, address: Address, begin: Begin, early: bool
) -> None:
    """Deleted, what it owned collected, the gateway killed, created again, and killed once more."""
    gateway, program, key = begin(early)
    assert lineages(tenant) == ([tenant.lineage] if early else [])
    with gateway.session(key) as (client, session_id):
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/small"}
        assert client.post("/create_sampling_session", json=body).status_code == 200
    tenant.delete_session()
    restart(gateway)
    program.say("step")
    gateway.wait_logged("call waits", f"{tenant.namespace}/{tenant.session} is not there")
    tenant.create_session(tenant.session, "org/small")
    restart(gateway)
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("step", seconds=60)
    with gateway.client(key) as client:
        sampled = client.post("/asample", json={"sampling_session_id": f"{session_id}:sample:0", "seq_id": 0})
        assert sampled.json()["request_id"] == f"{session_id}:sample:0:0"
    program.finish()
    assert set(Counter(tenant.accepted()).values()) == {1}


def test_nothing_is_sent_to_a_session_created_again_before_its_lineage_is_known(
    tenant: Tenant, processes: Processes, address: Address, begin: Begin
) -> None:
    """Its pod may run already, but on which storage only the next report says."""
    gateway, program, _ = begin(False)
    tenant.delete_session()
    tenant.create_session(tenant.session, "org/small")
    pod = tenant.start_pod(processes, address())
    lineage, tenant.lineage = tenant.lineage, ""
    tenant.serve(pod)
    program.say("step")
    gateway.wait_logged("call waits", f"{tenant.session} is Running; the lineage of its storage is not known yet")
    assert [record for record in tenant.ledger() if record["pod"] == pod.uid] == []
    tenant.lineage = lineage
    tenant.serve(pod)
    program.wait("step")
    program.finish()


@early_or_late
def test_a_loop_whose_storage_was_exchanged_is_told_so(
    tenant: Tenant, processes: Processes, address: Address, begin: Begin, early: bool
) -> None:
    """Every call is 410 with both lineages named, at a replica that has never seen the old one, and at the SDK."""
    gateway, program, key = begin(early)
    model = tenant.accepted()[0].rpartition(":")[0]
    with gateway.client(key) as client:
        sampling = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 7}
        path = f"tinker://{model}/weights/saved"
        sampler = client.post("/create_sampling_session", json={**sampling, "model_path": path}).json()
        tenant.delete_session()
        old, tenant.lineage = tenant.lineage, str(uuid.uuid4())
        tenant.create_session(tenant.session, "org/small")
        pod = tenant.start_pod(processes, address())
        tenant.serve(pod)
        restart(gateway)
        for call, body in (
            ("optim_step", {"model_id": model, "seq_id": 9}),
            ("retrieve_future", {"request_id": f"{model}:0"}),
            ("get_info", {"model_id": model}),
            ("asample", {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0}),
        ):
            answer = client.post(f"/{call}", json=body)
            assert answer.status_code == 410, call
            words = f"{tenant.namespace}/{tenant.session} was created again on other storage (lineage {tenant.lineage})"
            assert words in answer.json()["detail"]
            assert f"(lineage {old})" in answer.json()["detail"]
    program.say("step")
    assert "was created again on other storage" in program.wait("error")["message"]
    assert [record for record in tenant.ledger() if record["pod"] == pod.uid] == []


def test_a_model_that_no_pod_has_heard_of_goes_wherever_its_session_is(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Bound before there was any storage, and created again on another: nothing of it could be left behind."""
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train")
    wait_for("the binding", tenant.bindings)
    first = tenant.uid
    tenant.delete_session()
    tenant.create_session(tenant.session, "org/small")
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("created")
    program.say("step")
    program.wait("step")
    program.finish()
    (record,) = tenant.bindings(names.TYPE_LINEAGE)
    assert (record["metadata"]["name"], record["data"]) == (f"evl-{first}", {"lineage": tenant.lineage})


def test_two_replicas_record_one_lineage(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address
) -> None:
    """Both may find none recorded; what the first has written is what the second uses."""
    key, other = cluster.key(tenant.namespace), GatewayProcess(processes, cluster, address())
    with gateway.session(key) as (client, session_id), other.client(key) as second:

        def create(via: httpx.Client, number: int) -> httpx.Response:
            body = {"session_id": session_id, "model_seq_id": number, "base_model": "org/small"}
            return via.post("/create_model", json=body)

        calls = [background(create, via, number) for number, via in enumerate((client, second))]
        wait_for("both bindings", lambda: len(tenant.bindings()) == 2)
        tenant.serve(tenant.start_pod(processes, address()))
        assert [call.result(30).status_code for call in calls] == [200, 200]
    assert lineages(tenant) == [tenant.lineage]


def test_bindings_go_with_the_claim(tenant: Tenant, begin: Begin) -> None:
    """Binding and recorded lineage are the claim's alone; a model that no storage has either is not known."""
    gateway, program, key = begin(True)
    model = program.wait("created")["model_id"]
    assert (len(tenant.bindings()), len(lineages(tenant))) == (1, 1)
    tenant.delete_claim()
    assert (tenant.bindings(), lineages(tenant)) == ([], [])
    tenant.ledger_path.write_text("")
    restart(gateway)
    with gateway.client(key) as client:
        answer = client.post("/optim_step", json={"model_id": model, "seq_id": 9})
    assert answer.status_code == 404
    assert answer.json()["detail"] == f"model_id: {model!r} is not known; its storage may have been deleted"


def test_a_model_whose_claim_was_deleted_is_found_in_the_storage_that_came_back(
    cluster: Cluster, tenant: Tenant, processes: Processes, address: Address, begin: Begin
) -> None:
    """Its loop goes on and its paths lead there, through a replica that knows nothing; bound anew, to the new claim."""
    gateway, program, key = begin(False)
    model, old = program.wait("created")["model_id"], tenant.claim()["metadata"]["uid"]
    tenant.delete_claim()
    tenant.recovering("its volume is being restored")
    restart(gateway)
    program.say("step")
    gateway.wait_logged("call waits", "its volume is being restored")
    uid = tenant.uid
    tenant.create_session("elsewhere", "org/other")  # it has no pod, and is not waited for
    tenant.uid = uid
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("step", seconds=60)
    (binding,) = tenant.bindings()
    new = tenant.claim()["metadata"]["uid"]
    assert (binding["data"]["id"], binding["data"]["session"], new != old) == (model, tenant.session, True)
    assert [owner["uid"] for owner in binding["metadata"]["ownerReferences"]] == [new]
    program.finish()
    tenant.delete_claim()
    tenant.find_claim(tenant.session)
    restart(gateway)
    with gateway.session(cluster.key(tenant.namespace)) as (stranger, _):
        asked = stranger.post("/weights_info", json={"tinker_path": f"tinker://{model}/weights/saved"})
        assert (asked.status_code, tenant.bindings()) == (403, [])
    with gateway.client(key) as client:
        session_id = client.post("/create_session", json={}).json()["session_id"]
        path = f"tinker://{model}/weights/saved"
        load = {"session_id": session_id, "model_seq_id": 0, "path": path, "base_model": "org/small"}
        assert client.post("/load_weights", json=load).status_code == 200
        polled = client.post("/retrieve_future", json={"request_id": f"{model}:0"})
        assert polled.json() == {"model_id": model}
    owners = {owner["uid"] for binding in tenant.bindings() for owner in binding["metadata"]["ownerReferences"]}
    assert (len(tenant.bindings()), owners) == (2, {tenant.claim()["metadata"]["uid"]})
