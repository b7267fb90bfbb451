"""The ordinary way: models, samples and information, from the unmodified SDK through the gateway to a pod."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from everloop_operator.api import names
from tests.gateway.fake_pod import wire_schema
from tests.gateway.world import CLAIM, Cluster, GatewayProcess, Processes, SdkProcess, Tenant, wait_for

Start = Callable[..., SdkProcess]
Address = Callable[[], str]


@pytest.fixture
def serving(tenant: Tenant, processes: Processes, address: Address) -> Tenant:
    """A tenant whose session has a pod."""
    tenant.serve(tenant.start_pod(processes, address()))
    return tenant


def test_training_through_an_alias(cluster: Cluster, gateway: GatewayProcess, serving: Tenant, sdk: Start) -> None:
    """Protobuf and JSON calls arrive once and in order; the pod sees the real name and the key's id, not the key."""
    key = cluster.key(serving.namespace)
    program = sdk(gateway.url, key, "train", "small")
    created = program.wait("created")
    model = created["model_id"]
    assert (created["name"], created["tokenizer"]) == ("org/small", "org/small-tokenizer")
    for _ in range(2):
        program.say("step")
    assert program.wait("step", 2)["loss"] == 1.5
    program.finish()
    assert serving.accepted() == [f"{model}:{n}" for n in range(6)]
    assert program.named("saved")[0]["path"] == f"tinker://{model}/weights/saved"
    calls = [record for record in serving.ledger() if record.get("call") in ("forward_backward", "retrieve_future")]
    assert {record["key"] for record in calls} == {key.split("-")[1]}


def test_the_binding_is_an_immutable_config_map_of_the_storage(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant
) -> None:
    """It is there before the first answer, names session, lineage and key, and goes with the journal's claim."""
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"}
        for _ in range(2):
            assert client.post("/create_model", json=body).json() == {"request_id": f"{session_id}:train:0:0"}
    (binding,) = serving.bindings()
    assert binding["immutable"] is True
    assert binding["data"]["id"] == f"{session_id}:train:0"
    assert (binding["data"]["session"], binding["data"]["uid"]) == ("small", serving.uid)
    (owner,) = binding["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "name": CLAIM,
        "uid": serving.claim()["metadata"]["uid"],
    }
    assert binding["data"]["lineage"] == serving.lineage


def test_samples_go_with_the_weights_that_they_were_asked_for(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant, sdk: Start
) -> None:
    """Base model, checkpoint path, and a sampling session born of a save: each pod call says which."""
    program = sdk(gateway.url, cluster.key(serving.namespace), "sample")
    program.finish()
    assert [(e["client"], e["tokens"], e["base_model"]) for e in program.named("sampled")] == [
        ("base", [7], "org/small"),
        ("saved", [7], "org/small"),
        ("path", [7], "org/small"),
    ]
    seen = [record["weights"] for record in serving.ledger() if record.get("call") == "asample"]
    model = serving.accepted()[0].rpartition(":")[0]
    assert seen == ["base", None, f"tinker://{model}/weights/saved"]


def test_a_checkpoint_is_gone_on_from_where_it_lies(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant, sdk: Start
) -> None:
    """A new process with the same key: the new model is bound to the session of the checkpoint, not the default one."""
    key = cluster.key(serving.namespace)
    first = sdk(gateway.url, key, "train")
    first.wait("created")
    first.finish()
    path = first.named("saved")[0]["path"]
    serving.create_session("other", "org/small", {names.LABEL_DEFAULT: "true"})
    second = sdk(gateway.url, key, "resume", path)
    second.finish()
    created = second.named("created")[0]
    model = created["model_id"]
    assert model != first.named("created")[0]["model_id"]
    assert (created["name"], created["tokenizer"]) == ("org/small", "org/small-tokenizer")
    assert second.named("loaded")[0]["path"] == path
    assert second.named("refused")[0]["message"].count("path: ")
    assert [request for request in serving.accepted() if request.startswith(model)] == [
        f"{model}:{n}" for n in range(5)
    ]
    assert {b["data"]["session"] for b in serving.bindings() if b["data"]["id"] == model} == {"small"}


def test_a_key_lists_its_own_runs_and_checkpoints(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant, processes: Processes, address: Address, sdk: Start
) -> None:
    """Newest first, page by page, and no other key's; a session without a pod is not waited for."""
    serving.create_session("idle", "org/idle")
    keys = [cluster.key(serving.namespace) for _ in range(2)]
    models: list[str] = []
    for key in (keys[0], keys[0], keys[1]):
        program = sdk(gateway.url, key, "train")
        models.append(program.wait("created")["model_id"])
        program.finish()
    paths = [f"tinker://{model}/weights/saved" for model in models]
    program = sdk(gateway.url, keys[0], "listing", "5")
    program.finish()
    assert [(event["run"], event["paths"]) for event in program.named("run")] == [
        (models[1], [paths[1]]),
        (models[0], [paths[0]]),
    ]
    assert {event["owner"] for event in program.named("run")} == {"someone"}
    assert program.named("all") == [{"event": "all", "paths": [paths[1], paths[0]], "total": 2}]
    sessions = [model.partition(":")[0] for model in (models[1], models[0])]
    (told,) = program.named("sessions")
    assert (told["ids"], told["runs"]) == (sessions, [[models[1]], [models[0]]])
    assert told["samplers"] == [[f"{session}:sample:0"] for session in sessions]
    assert [(each["id"], each["owner"], each["checkpoints"]) for each in program.named("found")] == [
        (session, "someone", 1) for session in sessions
    ]
    assert program.named("weights") == [{"event": "weights", "base": "org/small", "rank": 8}]
    with gateway.client(keys[1]) as client:
        assert client.get("/checkpoints?limit=1&offset=1").json()["checkpoints"] == []
        assert client.get(f"/training_runs/{models[0]}").status_code == 403
        assert client.get("/training_runs?limit=-1").status_code == 400
        assert client.get("/audit").status_code == 404
    with gateway.client(keys[0]) as client:
        page = client.get("/checkpoints?limit=1&offset=1").json()
    assert [one["tinker_path"] for one in page["checkpoints"]] == [paths[0]]
    assert page["cursor"] == {"limit": 1, "offset": 1, "total_count": 2}


def test_a_checkpoint_of_another_key_is_not_loaded(cluster: Cluster, gateway: GatewayProcess, serving: Tenant) -> None:
    """Not into a new model, which is refused and bound nowhere, nor into an own one, where the operation fails."""
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        path = f"tinker://{session_id}:train:0/weights/saved"
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        new = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
        answer = client.post("/load_weights", json=new)
        assert (answer.status_code, answer.json()["detail"].startswith("path: ")) == (403, True)
        assert len(serving.bindings()) == 1
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        own = {"model_id": f"{session_id}:train:0", "seq_id": 1, "path": path, "optimizer": True}
        request = client.post("/load_weights", json=own).json()
        failed = client.post("/retrieve_future", json=request).json()
    assert (failed["category"], failed["error"]) == ("user", f"path: {path}")


def test_the_key_of_a_job_reads_its_start_checkpoint_and_trains_on_its_session(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant
) -> None:
    """The one foreign path that its Secret names, and no other; new models go to the session that it names."""
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        paths = [f"tinker://{session_id}:train:0/weights/{name}" for name in ("start", "other")]
    serving.create_session("other", "org/small", {names.LABEL_DEFAULT: "true"})
    key = cluster.mint_key(serving.namespace)
    key.manifest["stringData"] |= {"session": "small", "checkpoint": paths[0]}
    key.apply()
    with gateway.session(key.text) as (client, session_id):
        new = {"session_id": session_id, "model_seq_id": 0, "path": paths[1], "optimizer": True}
        assert client.post("/load_weights", json=new).status_code == 403
        assert client.post("/load_weights", json={**new, "path": paths[0]}).status_code == 200
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 1, "base_model": "org/small"})
        own = {"model_id": f"{session_id}:train:1", "seq_id": 1, "path": paths[0], "optimizer": True}
        assert "error" not in client.post("/retrieve_future", json=client.post("/load_weights", json=own).json()).json()
    bound = {b["data"]["id"]: b["data"]["session"] for b in serving.bindings()}
    assert [bound[f"{session_id}:train:{n}"] for n in (0, 1)] == ["small", "small"]


def test_an_unknown_base_model_is_a_bad_request_that_lists_the_known(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant, sdk: Start
) -> None:
    """The SDK raises BadRequestError at once, with a near name."""
    program = sdk(gateway.url, cluster.key(serving.namespace), "train", "org/smal")
    error = program.wait("error")
    assert error["type"] == "BadRequestError"
    assert "base_model 'org/smal'" in error["message"]
    assert "did you mean 'org/small'?" in error["message"]
    assert serving.bindings() == []


def test_a_session_of_another_namespace_is_not_found(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant
) -> None:
    """A key reaches its own namespace only."""
    with gateway.session(cluster.key(cluster.namespace("team-empty"))) as (client, session_id):
        assert client.get("/get_server_capabilities").json() == {"supported_models": []}
        answer = client.post(
            "/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"}
        )
    assert (answer.status_code, "known: none" in answer.json()["detail"]) == (400, True)


def test_the_default_session_is_chosen_and_a_binding_stays(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant
) -> None:
    """A newer session labelled as default gets new models; a repeated create_model stays where it was."""
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        body = {"session_id": session_id, "base_model": "org/small"}
        client.post("/create_model", json={**body, "model_seq_id": 0})
        serving.create_session("other", "org/small", {names.LABEL_DEFAULT: "true"})

        def bound(number: int) -> str:
            answer = client.post("/create_sampling_session", json={**body, "sampling_session_seq_id": number})
            sampler = answer.json()["sampling_session_id"]
            found = {b["data"]["id"]: b["data"]["session"] for b in serving.bindings()}
            assert found[f"{session_id}:train:0"] == "small"
            return str(found[sampler])

        numbers = iter(range(1000))
        wait_for("the default session", lambda: bound(next(numbers)) == "other")
        assert client.post("/create_model", json={**body, "model_seq_id": 0}).status_code == 200
    assert serving.accepted() == [f"{session_id}:train:0:0"]


def test_what_a_sampler_and_a_checkpoint_are(cluster: Cluster, gateway: GatewayProcess, serving: Tenant) -> None:
    """samplers/{id} answers from the binding, weights_info from the pod; what is not known is 404."""
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        path = f"tinker://{session_id}:train:0/weights/one"
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
        answer = client.post("/create_sampling_session", json=body)
        assert (answer.status_code, "model_path" in answer.json()["detail"]) == (404, True)
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        sampler = client.post("/create_sampling_session", json=body).json()["sampling_session_id"]
        assert client.get(f"/samplers/{sampler}").json() == {
            "sampler_id": sampler,
            "base_model": "org/small",
            "model_path": path,
        }
        info = client.post("/weights_info", json={"tinker_path": path}).json()
        assert info == {"base_model": "org/small", "is_lora": True, "lora_rank": 8, "train_mlp": True}
        for bad in ("tinker://nothing", f"tinker://{session_id}:train:0/elsewhere/x"):
            answer = client.post("/weights_info", json={"tinker_path": bad})
            assert (answer.status_code, "tinker_path" in answer.json()["detail"]) == (400, True)
        answer = client.post("/weights_info", json={"tinker_path": f"tinker://{session_id}:train:9/weights/x"})
        assert (answer.status_code, "tinker_path" in answer.json()["detail"]) == (404, True)
        assert client.get("/samplers/nothing").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "word"),
    [
        ("optim_step", b"{", {}, 400, "not JSON"),
        ("optim_step", b"{}", {}, 400, "model_id"),
        ("optim_step", b'{"model_id": "x"}', {}, 404, "model_id"),
        ("create_session", b"{", {}, 400, "not JSON"),
        ("create_session", b"[]", {}, 400, "not a JSON object"),
        ("create_model", b'{"session_id": 3}', {}, 400, "session_id"),
        ("retrieve_future", b'{"request_id": "x"}', {}, 410, "request_id"),
        ("cancel_future", b"{}", {}, 400, "request_id"),
        ("forward_backward", b"\xff\xff", {"content-type": "application/x-protobuf"}, 400, "protobuf"),
        ("forward_backward", b"{}", {}, 415, "content-type"),
        (
            "forward_backward",
            b"",
            {"content-type": "application/x-protobuf", "content-encoding": "zstd"},
            415,
            "content-encoding",
        ),
        ("load_weights", b"{}", {}, 400, "path"),
        ("load_weights", b'{"path": "tinker://x/weights/y"}', {}, 400, "session_id"),
        ("create_custom_loss", b"{}", {}, 400, "session_id"),
        ("save_weights_anywhere", b"{}", {}, 404, "save_weights_anywhere is not served"),
    ],
)
def test_an_undecodable_call_is_refused_with_its_field(
    cluster: Cluster,
    gateway: GatewayProcess,
    tenant: Tenant,
    path: str,
    body: bytes,
    headers: dict[str, str],
    status: int,
    word: str,
) -> None:
    """What cannot be routed is not held for a pod that is not there, and the message names the field."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, _):
        answer = client.post(f"/{path}", content=body, headers={"content-type": "application/json"} | headers)
    assert answer.status_code == status
    assert word in answer.json()["detail"]
    assert tenant.bindings() == []


def test_a_cancelled_sample_is_told_to_its_pod(cluster: Cluster, gateway: GatewayProcess, serving: Tenant) -> None:
    """Without waiting for it to end, and the SDK is told that it may; a request that nobody made is refused."""
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        assert client.post("/client/dynamic_config").json()["sample_cancel_enabled"] is True
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/small"}
        sampler = client.post("/create_sampling_session", json=body).json()["sampling_session_id"]
        request = client.post("/asample", json={"sampling_session_id": sampler, "seq_id": 0}).json()["request_id"]
        assert client.post("/cancel_future", json={"request_id": request}).status_code == 200
        assert [r["cancelled"] for r in serving.ledger() if "cancelled" in r] == [request]
        unknown = client.post("/cancel_future", json={"request_id": f"{session_id}:sample:7:0"})
    assert (unknown.status_code, "request_id" in unknown.json()["detail"]) == (410, True)


def test_a_poll_for_all_samples_goes_to_the_pod_of_their_session(
    cluster: Cluster, gateway: GatewayProcess, serving: Tenant
) -> None:
    """Of the key's own sampling session alone; clients are not told to do so unless the platform says so."""
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        assert client.post("/client/config").json()["sample_use_retrieve_futures"] is False
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/small"}
        sampler = client.post("/create_sampling_session", json=body).json()["sampling_session_id"]
        for seq in range(2):
            client.post("/asample", json={"sampling_session_id": sampler, "seq_id": seq})
        found = client.post("/retrieve_futures", json={"target": {"sampling_session_id": sampler}, "prev_cursor": 0})
        assert found.json() == {
            "completions": [{"state": "finished", "request_id": f"{sampler}:{seq}"} for seq in range(2)],
            "cursor": 2,
        }
        for target, status, field in (
            (None, 400, "target"),
            ({}, 400, "sampling_session_id"),
            ({"sampling_session_id": f"{session_id}:train:0"}, 404, "sampling_session_id"),
            ({"sampling_session_id": f"{session_id}:sample:9"}, 404, "sampling_session_id"),
        ):
            refused = client.post("/retrieve_futures", json={"target": target})
            assert (refused.status_code, field in refused.json()["detail"]) == (status, True)


def test_what_the_platform_has_switched_on_is_told_to_clients_and_pods(
    cluster: Cluster, serving: Tenant, processes: Processes, address: Address
) -> None:
    """Batched polls to the SDK; stand-ins to the pod, with each operation that may need them."""
    switches = {"EVERLOOP_BATCHED_POLLS": "true", "EVERLOOP_STAND_INS": "true"}
    gateway = GatewayProcess(processes, cluster, address(), **switches)
    message = wire_schema().ForwardBackwardRequest(seq_id=1, loss_fn="stable_reinforce")
    with gateway.session(cluster.key(serving.namespace)) as (client, session_id):
        assert client.post("/client/config").json()["sample_use_retrieve_futures"] is True
        client.post("/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": "org/small"})
        message.model_id = f"{session_id}:train:0"
        headers = {"content-type": "application/x-protobuf"}
        client.post("/forward_backward", content=message.SerializeToString(), headers=headers)
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/small"}
        sampler = client.post("/create_sampling_session", json=body).json()["sampling_session_id"]
        client.post("/asample", json={"sampling_session_id": sampler, "seq_id": 0})
    calls = [record for record in serving.ledger() if "call" in record]
    assert {(record["call"], record["stand_ins"], record["weights"]) for record in calls} == {
        ("create_model", None, None),
        ("forward_backward", "true", None),
        ("asample", "true", "base"),
    }


def test_an_unknown_request_is_410(cluster: Cluster, gateway: GatewayProcess, tenant: Tenant) -> None:
    """404 would end the user's program as a lost promise."""
    with gateway.session(cluster.key(tenant.namespace)) as (client, session_id):
        answer = client.post("/retrieve_future", json={"request_id": f"{session_id}:train:5:1"})
    assert answer.status_code == 410
