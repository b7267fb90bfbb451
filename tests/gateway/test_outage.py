"""Outages behind and of the gateway: no exception in the user's program, and every operation once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from everloop_operator.api import names
from tests.gateway.process_table import process_of
from tests.gateway.world import (
    Cluster,
    GatewayProcess,
    Processes,
    SdkProcess,
    Tenant,
    background,
    wait_for,
)

Start = Callable[..., SdkProcess]
Address = Callable[[], str]


def assert_each_once(tenant: Tenant) -> None:
    counts = Counter(tenant.accepted())
    assert set(counts.values()) == {1}, counts


def test_a_loop_outlasts_a_time_without_a_pod(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Submits are held with white space, polls are told why, samples come again, and then it all goes on."""
    key = cluster.key(tenant.namespace)
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, key, "train")
    model = program.wait("created")["model_id"]
    sampler = f"{model.partition(':')[0]}:sample:0"
    with gateway.client(key) as client:
        body = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 0, "base_model": "org/small"}
        assert client.post("/create_sampling_session", json=body).status_code == 200
        pod.kill()
        tenant.recovering("node node-b lost")
        program.say("step")
        polling = background(client.post, "/retrieve_future", json={"request_id": f"{model}:0"})
        sampling = background(client.post, "/asample", json={"sampling_session_id": sampler, "seq_id": 0})
        pieces: list[bytes] = []
        submitting = background(read_pieces, client, {"model_id": model, "seq_id": 100}, pieces)
        assert sampling.result(60).status_code == 429
        poll = polling.result(60)
        assert poll.status_code == 408
        assert poll.json()["queue_state"] == "paused_capacity"
        assert "is Recovering: node node-b lost" in poll.json()["queue_state_reason"]
        wait_for("white space", lambda: len(pieces) >= 3)
        assert (tenant.accepted(), program.named("step")) == ([f"{model}:0"], [])
        tenant.serve(tenant.start_pod(processes, address()))
        submitting.result(30)
    assert pieces[:3] == [b" ", b" ", b" "]
    assert b"".join(pieces).strip().startswith(b'{"request_id"')
    program.wait("step")
    program.finish()
    assert_each_once(tenant)


def read_pieces(client: httpx.Client, body: dict[str, object], pieces: list[bytes]) -> None:
    """Collect the pieces of an optim_step's answer as they come."""
    with client.stream("POST", "/optim_step", json=body) as answer:
        assert answer.status_code == 200
        pieces.extend(answer.iter_raw())


def test_calls_leave_a_silent_pod_as_soon_as_another_takes_its_place(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """A dead node answers nothing and resets nothing: poll and submit in flight are aborted by the new status."""
    old, new = tenant.start_pod(processes, address()), tenant.start_pod(processes, address())
    tenant.serve(old)
    key = cluster.key(tenant.namespace)
    program = sdk(gateway.url, key, "train")
    model = program.wait("created")["model_id"]
    old.mode("hold")
    program.say("step")
    wait_for("the polls", lambda: tenant.calls("retrieve_future", old) >= 3)
    old.freeze()
    with gateway.client(key) as client:
        submit = background(client.post, "/optim_step", json={"model_id": model, "seq_id": 50})
        wait_for("a call that nobody reads", lambda: unread(old.ip))
        assert not submit.done()
        tenant.serve(new)
        assert submit.result(30).json() == {"request_id": f"{model}:50"}
        program.wait("step")
    assert tenant.calls("optim_step", new) >= 1
    program.finish()
    assert_each_once(tenant)


@pytest.mark.parametrize("mode", ["fenced", "stranger"])
def test_a_pod_that_is_not_the_session_any_more_is_not_believed(
    cluster: Cluster,
    gateway: GatewayProcess,
    tenant: Tenant,
    processes: Processes,
    address: Address,
    sdk: Start,
    mode: str,
) -> None:
    """421 is between gateway and pod, 404 of whoever has a dead pod's address: the call waits for the next pod."""
    old = tenant.start_pod(processes, address())
    tenant.serve(old)
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train")
    program.wait("created")
    old.mode(mode)
    program.say("step")
    gateway.wait_logged(
        "call waits", f"{tenant.namespace}/{tenant.session} is Running; its session pod does not answer"
    )
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("step", 1, 20)
    program.finish()
    assert_each_once(tenant)


def test_a_pod_that_restarts_in_place_is_found_again(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Same address and UID, no change of status: resets and refusals alone bring the calls back."""
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train")
    program.wait("created")
    pod.mode("hold")
    program.say("step")
    wait_for("the polls", lambda: tenant.calls("retrieve_future", pod) >= 3)
    pod.kill()
    pod.start()
    program.wait("step", 1, 8)
    program.finish()
    assert_each_once(tenant)


def test_a_model_created_before_there_is_a_pod(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """The first call of a user who is faster than the cluster is held, too."""
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train")
    gateway.wait_logged("call held", f"{tenant.namespace}/{tenant.session}")
    assert program.events == []
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("created")
    program.finish()


def test_a_session_created_again_under_its_name_goes_on(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Another UID, the same base model and storage: bound models follow the name."""
    tenant.serve(tenant.start_pod(processes, address()))
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train")
    program.wait("created")
    cluster.api.call("DELETE", f"{tenant.path}/{tenant.session}")
    program.say("step")
    gateway.wait_logged("call waits", f"{tenant.namespace}/{tenant.session} is not there")
    assert (len(tenant.accepted()), program.named("step")) == (1, [])
    tenant.create_session(tenant.session, "org/small")
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("step")
    program.finish()
    assert_each_once(tenant)


def test_a_killed_gateway_loses_nothing(
    cluster: Cluster, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """SIGKILL in the middle of a long poll; its successor knows session, model and binding."""
    gateway = GatewayProcess(processes, cluster, address())
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train")
    program.wait("created")
    pod.mode("hold")
    program.say("step")
    wait_for("the polls", lambda: tenant.calls("retrieve_future", pod) >= 3)
    gateway.process.kill()
    gateway.process.wait()
    pod.mode("serve")
    gateway.start()
    program.wait("step")
    program.say("step")
    program.wait("step", 2)
    program.finish()
    assert_each_once(tenant)


def test_an_ending_gateway_sends_its_clients_on(
    cluster: Cluster, tenant: Tenant, processes: Processes, address: Address
) -> None:
    """SIGTERM: polls are answered, a streamed submit is dropped, and the process ends."""
    gateway = GatewayProcess(processes, cluster, address())
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"}
        begun = threading.Event()
        creating = background(stream_error, client, "/create_model", body, begun)
        assert begun.wait(30)
        polling = background(client.post, "/retrieve_future", json={"request_id": f"{session_id}:train:0:0"})
        gateway.wait_logged("call waits", f"{tenant.namespace}/{tenant.session}", 2)
        gateway.process.send_signal(signal.SIGTERM)
        poll = polling.result(10)
        assert (poll.status_code, poll.headers["connection"]) == (408, "close")
        assert creating.result(10) is httpx.RemoteProtocolError
    gateway.process.wait(10)
    assert '"level": "error"' not in gateway.log.read_text()


def stream_error(
    client: httpx.Client, path: str, body: dict[str, object], begun: threading.Event
) -> type[Exception] | None:
    """With which error a streamed answer breaks off."""
    try:
        with client.stream("POST", path, json=body) as answer:
            for _ in answer.iter_raw():
                begun.set()
    except httpx.TransportError as error:
        return type(error)
    return None


def test_an_error_found_while_the_answer_streams_reaches_the_repeat(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address
) -> None:
    """The 200 has been said, so the connection is dropped; the client repeats and gets the real status."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"}
        with pytest.raises(httpx.ReadTimeout):
            client.post("/create_model", json=body, timeout=1.0)
        begun = threading.Event()
        asking = background(stream_error, client, "/get_info", {"model_id": f"{session_id}:train:0"}, begun)
        assert begun.wait(10)
        # The client left before there was a pod, so this one has never heard of the model.
        tenant.serve(tenant.start_pod(processes, address()))
        assert asking.result(5) is httpx.RemoteProtocolError
        assert client.post("/get_info", json={"model_id": f"{session_id}:train:0"}).status_code == 404
    assert tenant.accepted() == []


def test_the_api_server_may_be_away(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Models that the gateway has seen train on while nobody answers at the API server; new ones wait for it."""
    tenant.serve(tenant.start_pod(processes, address()))
    key = cluster.key(tenant.namespace)
    program = sdk(gateway.url, key, "train")
    program.wait("created")
    earlier = len(gateway.logged("call waits", "the Kubernetes API does not answer"))
    api_server = process_of(cluster.plane.directory / "kube-apiserver")
    os.kill(api_server, signal.SIGSTOP)
    try:
        program.say("step")
        program.wait("step")
        late = sdk(gateway.url, key, "train")
        gateway.wait_logged("call waits", "the Kubernetes API does not answer", earlier + 1)
        assert late.events == []
    finally:
        os.kill(api_server, signal.SIGCONT)
    late.wait("created")
    for each in (program, late):
        each.finish()
    assert_each_once(tenant)


def unread(ip: str) -> bool:
    """Has a connection to the session pod at this address brought what the pod has not read?"""
    local = f"{socket.inet_aton(ip)[::-1].hex().upper()}:{names.TRAINER_PORT:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(line[1] == local and int(line[4].partition(":")[2], 16) > 0 for line in lines)
