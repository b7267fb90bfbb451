"""Saves that find no session pod: acknowledged, kept at the API server, and done once there is one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from everloop_gateway.bindings import Bindings
from everloop_gateway.intents import Intent, Intents, from_config_map, to_config_map
from everloop_gateway.kube import ApiUnavailable, Kube, pause
from everloop_gateway.state import Sessions
from everloop_gateway.upstream import Upstream, http_client
from everloop_gateway.waking import Waker
from everloop_operator.api import names
from tests.gateway.process_table import process_of
from tests.gateway.world import (
    RELEASE_NAMESPACE,
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

CONFIG_MAPS = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/configmaps"
INTENT = Intent("s-0123456789abcdef-0123456789abcdef:train:0:7", "team", "/api/v1/save_weights", b"\xff{}")


def kept(cluster: Cluster, tenant: Tenant) -> list[str]:
    """Request ids of a tenant's calls that are kept."""
    found = cluster.api.call("GET", f"{CONFIG_MAPS}?labelSelector={names.LABEL_TYPE}={names.TYPE_INTENT}")
    return [i["data"]["requestId"] for i in found["items"] if i["data"]["namespace"] == tenant.namespace]


def keep(cluster: Cluster, intent: Intent, labels: dict[str, str] | None) -> None:
    """Keep a call as a replica does; with other labels none of them delivers it by itself."""
    body = to_config_map(intent)
    body["metadata"]["labels"] = body["metadata"]["labels"] if labels is None else labels
    cluster.api.call("POST", CONFIG_MAPS, body)


def exists(cluster: Cluster, intent: Intent) -> bool:
    return cluster.api.exists(f"{CONFIG_MAPS}/{intent.name}")


def trained(client: Any, session_id: str) -> str:
    """A new model."""
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"}
    assert client.post("/create_model", json=body).status_code == 200
    return f"{session_id}:train:0"


def saving(model: str) -> dict[str, Any]:
    return {"model_id": model, "seq_id": 1, "path": "saved"}


def test_a_save_outlasts_pod_and_gateway(
    cluster: Cluster, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Acknowledged without a pod, then its replica is killed; another one brings it to the next pod, once."""
    gateway = GatewayProcess(processes, cluster, address())
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    program = sdk(gateway.url, cluster.key(tenant.namespace), "train")
    model = program.wait("created")["model_id"]
    pod.kill()
    tenant.recovering("no node is free")
    program.say("end")
    wait_for("the save to be kept", lambda: kept(cluster, tenant) == [f"{model}:1"])
    gateway.process.kill()
    gateway.process.wait()
    gateway.start()
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("end")
    assert program.named("saved")[0]["path"] == f"tinker://{model}/weights/saved"
    wait_for("nothing to be kept", lambda: not kept(cluster, tenant))
    assert Counter(tenant.accepted()) == {f"{model}:0": 1, f"{model}:1": 1}


def test_a_held_answer_outlasts_its_gateway(
    cluster: Cluster, tenant: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Killed in the middle of the white space: the program sees nothing, and each operation is done once."""
    gateway = GatewayProcess(processes, cluster, address())
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    key = cluster.key(tenant.namespace)
    program = sdk(gateway.url, key, "train")
    model = program.wait("created")["model_id"]
    pod.kill()
    tenant.recovering("no node is free")
    program.say("step")
    with gateway.client(key) as client:
        later: list[bytes] = []
        body = {"model_id": model, "seq_id": 100}
        held = background(stream, client, "/optim_step", body, later)
        wait_for("white space for a call that came later", lambda: later)
        gateway.process.kill()
        gateway.process.wait()
        with pytest.raises(httpx.TransportError):
            held.result(10)
    gateway.start()
    tenant.serve(tenant.start_pod(processes, address()))
    program.wait("step")
    program.finish()
    assert Counter(tenant.accepted()) == {f"{model}:{number}": 1 for number in range(4)}


def test_a_kept_save_is_done_though_its_client_is_gone(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address
) -> None:
    """It was acknowledged: nobody has to poll for it. A repeat is answered as it was, and does nothing."""
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        model = trained(client, session_id)
        pod.kill()
        both = [background(client.post, "/save_weights", json=saving(model)) for _ in range(2)]
        answers = [each.result(40).json() for each in both]
        assert answers == [{"request_id": f"{model}:1"}] * 2
    tenant.serve(tenant.start_pod(processes, address()))
    wait_for("the save to be done", lambda: tenant.accepted() == [f"{model}:0", f"{model}:1"])
    wait_for("nothing to be kept", lambda: not kept(cluster, tenant))


def test_a_poll_that_overtakes_a_kept_save_brings_it(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address
) -> None:
    """410 would end the client: a replica whose watch is late looks at the API server before it believes the pod."""
    tenant.serve(tenant.start_pod(processes, address()))
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        model = trained(client, session_id)
        body = b'{"model_id": "%s", "seq_id": 1, "path": "saved"}' % model.encode()
        intent = Intent(f"{model}:1", tenant.namespace, "/api/v1/save_weights", body)
        keep(cluster, intent, {})
        done = client.post("/retrieve_future", json={"request_id": f"{model}:1"})
        assert (done.status_code, done.json()) == (200, {"path": f"tinker://{model}/weights/saved"})
        assert not exists(cluster, intent)
        assert client.post("/retrieve_future", json={"request_id": f"{model}:2"}).status_code == 410


def test_what_is_kept_for_a_deleted_session_is_forgotten(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant
) -> None:
    """Its binding is gone with it; nothing is left that could be saved."""
    intent = Intent(INTENT.request_id, tenant.namespace, INTENT.path, b"{}")
    keep(cluster, intent, None)
    wait_for("it to be forgotten", lambda: not exists(cluster, intent))


def test_a_save_without_pod_and_api_server_is_held(
    cluster: Cluster, gateway: GatewayProcess, tenant: Tenant, processes: Processes, address: Address
) -> None:
    """White space until one of the two is back: nothing is acknowledged that is kept nowhere."""
    pod = tenant.start_pod(processes, address())
    tenant.serve(pod)
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        model = trained(client, session_id)
        pod.kill()
        api_server = process_of(cluster.plane.directory / "kube-apiserver")
        os.kill(api_server, signal.SIGSTOP)
        pieces: list[bytes] = []
        try:
            saved = background(stream, client, "/save_weights", saving(model), pieces)
            wait_for("a second piece of white space", lambda: len(pieces) >= 2)
            assert b"".join(pieces).strip() == b""
        finally:
            os.kill(api_server, signal.SIGCONT)
        assert saved.result(30).strip() == b'{"request_id": "%s:1"}' % model.encode()
        assert kept(cluster, tenant) == [f"{model}:1"]


def stream(client: Any, path: str, body: dict[str, Any], pieces: list[bytes]) -> bytes:
    """A call's whole answer, and its pieces as they come."""
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        pieces.extend(answer.iter_raw())
    return b"".join(pieces)


class AskedKube(Kube):
    """An API server that is away, and knows whether it was asked."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def list(self, path: str, selectors: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        self.asked.set()
        raise ApiUnavailable("in this test")


async def nobody(namespace: str, name: str, uid: str) -> None:
    raise AssertionError("nothing is idle here")


async def test_nothing_is_delivered_before_sessions_and_master_key_are_known() -> None:
    """A replica that has just started would find no session, and forget what is kept for it."""
    kube, ready, sessions = AskedKube(), asyncio.Event(), Sessions()
    async with http_client() as http:
        bindings = Bindings(kube)
        upstream = Upstream(sessions, bindings, http, bytes, Waker(nobody))
        intents = Intents(kube, RELEASE_NAMESPACE, bindings, upstream)
        running = asyncio.create_task(intents.run(ready))
        assert not await pause(kube.asked, 0.2)
        ready.set()
        await asyncio.wait_for(kube.asked.wait(), 10)
        running.cancel()
        await asyncio.wait([running])


def test_an_intent_is_kept_bit_by_bit() -> None:
    """Also a body that is not UTF-8."""
    assert from_config_map(to_config_map(INTENT)) == INTENT


@pytest.mark.parametrize(
    "change",
    [
        {"data": {}},
        {"binaryData": None},
        {"binaryData": {"body": "%"}},
        {"data": {"requestId": "x", "namespace": "team", "path": "/"}},
        {"metadata": {"name": "evi-0"}},
    ],
)
def test_what_is_no_intent_is_none(change: dict[str, Any]) -> None:
    """Somebody else's ConfigMap with our label is left alone."""
    assert from_config_map({**to_config_map(INTENT), **change}) is None
