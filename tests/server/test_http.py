"""The pod over HTTP, as gateway and operator see it, with a real engine behind it."""

from __future__ import annotations

import concurrent.futures
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
import zstandard

from everloop_trainer.server.bodies import MAX_JSON_BYTES, MAX_PROTOBUF_BYTES
from everloop_trainer.tinker_proto import tinker_public
from tests.server import tinymodel
from tests.server.pod import REPOSITORY, Pod, eventually
from tests.server.wire import Wire, forward_backward_body, texts

PROTOBUF = "application/x-protobuf"
VALID = forward_backward_body("s-1:train:0", 1, [])


@pytest.fixture
def wire(pod: Pod) -> Iterator[Wire]:
    """A new client of the running pod."""
    wire = Wire(pod)
    yield wire
    wire.client.close()


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic " + "5e" * 32, "Bearer"])
@pytest.mark.parametrize("path", ["/status", "/api/v1/get_info", "/nothing"])
def test_nothing_is_told_without_the_token(pod: Pod, path: str, authorization: str | None) -> None:
    """Every path but the probes answers 401 to a missing or wrong token."""
    headers = {"X-Everloop-Pod-UID": pod.uid} | ({"Authorization": authorization} if authorization else {})
    assert httpx.get(pod.url + path, headers=headers).status_code == 401


def test_probes_are_open_and_say_nothing_else(pod: Pod) -> None:
    """Liveness and readiness need no token and carry no information."""
    for path in ("/healthz", "/readyz"):
        answer = httpx.get(pod.url + path)
        assert (answer.status_code, answer.text) == (200, "ok")


def test_calls_for_another_pod_are_misdirected(pod: Pod) -> None:
    """A call that names another pod, or none, is answered 421; the operator's status call may name none."""
    token = {"Authorization": pod.headers["Authorization"]}
    for headers in (token, token | {"X-Everloop-Pod-UID": "another"}):
        assert httpx.post(f"{pod.url}/api/v1/get_info", json={}, headers=headers).status_code == 421
    assert httpx.get(f"{pod.url}/status", headers=token | {"X-Everloop-Pod-UID": "another"}).status_code == 421
    assert httpx.get(f"{pod.url}/status", headers=token).status_code == 200


def test_answers_name_the_pod_that_gave_them(pod: Pod, wire: Wire) -> None:
    """By it a caller knows that nobody else has taken over the pod's address; without the token nobody learns it."""
    assert pod.get("/status").headers["x-everloop-pod-uid"] == pod.uid
    assert wire.post("get_info", {"model_id": "unknown"}).headers["x-everloop-pod-uid"] == pod.uid
    assert "x-everloop-pod-uid" not in httpx.get(f"{pod.url}/status").headers


def test_the_operator_may_ask_for_snapshots(pod: Pod) -> None:
    """With the session token, by name; what is no name is refused by its field, and others may not ask."""
    token = {"Authorization": pod.headers["Authorization"]}
    assert httpx.post(f"{pod.url}/snapshot", json={"id": "move-1"}, headers=token).status_code == 202
    eventually(lambda: pod.get("/status").json()["snapshotRequest"] == {"id": "move-1", "pending": 0}, "the snapshots")
    for wrong in ({}, {"id": 1}, {"id": ""}, {"id": "x" * 254}):
        refused = httpx.post(f"{pod.url}/snapshot", json=wrong, headers=token)
        assert (refused.status_code, "id: " in refused.text) == (400, True)
    assert httpx.post(f"{pod.url}/snapshot", json={"id": "move-2"}).status_code == 401
    other = token | {"X-Everloop-Pod-UID": "another"}
    assert httpx.post(f"{pod.url}/snapshot", json={"id": "move-2"}, headers=other).status_code == 421


def test_status_says_what_the_operator_shows(pod: Pod) -> None:
    """State, incarnation, base model with its hash, and the engine's process."""
    status = pod.get("/status").json()
    assert status["state"] == "Serving"
    assert status["incarnation"] | {"number": 0, "boot": 0} == {"number": 0, "attempt": 1, "boot": 0, "podUID": pod.uid}
    assert status["baseModel"]["name"] == tinymodel.NAME
    assert len(status["baseModel"]["manifestSHA256"]) == 64
    assert status["engine"]["pid"] in list(pod.processes())


@pytest.mark.parametrize(
    ("content", "headers", "status", "named"),
    [
        (b"\xff\xff\xff", {}, 400, "ForwardBackwardRequest"),
        (forward_backward_body("", 1, []), {}, 400, "model_id"),
        (forward_backward_body("s-1:train:0", 0, []), {}, 400, "seq_id"),
        (b"{}", {"Content-Type": "application/json"}, 415, "Content-Type"),
        (b"", {"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
        (b"no zstd", {"Content-Encoding": "zstd"}, 400, "zstd"),
        (zstandard.compress(VALID)[:-1], {"Content-Encoding": "zstd"}, 400, "zstd"),
        (zstandard.compress(VALID) + b"more", {"Content-Encoding": "zstd"}, 400, "zstd"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(VALID), {"Content-Encoding": "zstd"}, 400, "zstd"),
        (b"\x1a\x00" * (1 << 20), {}, 400, "fields"),
        (zstandard.compress(bytes(MAX_PROTOBUF_BYTES + 1)), {"Content-Encoding": "zstd"}, 413, "decompressed"),
    ],
)
def test_undecodable_protobuf_is_refused(
    wire: Wire, content: bytes, headers: dict[str, str], status: int, named: str
) -> None:
    """What cannot be decoded or addressed is a 4xx that says what is wrong."""
    answer = wire.post_protobuf(content, **headers)
    assert answer.status_code == status
    assert named in answer.json()["detail"]


@pytest.mark.parametrize(
    ("content", "status", "named"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'{"seq_id": 1}', 400, "model_id"),
        (b'{"seq_id": 1, "a": {"b": 1, "b": 2}}', 400, "'b'"),
        (b'{"seq_id": ' + b"1" * 5000 + b"}", 400, "JSON"),
        (b"[" + b"[]," * (1 << 18) + b"[]]", 400, "brackets"),
        (b" " * (MAX_JSON_BYTES + 1), 413, "larger"),
    ],
)
def test_undecodable_json_is_refused(wire: Wire, content: bytes, status: int, named: str) -> None:
    """As for protobuf."""
    answer = wire.client.post("/api/v1/optim_step", content=content)
    assert answer.status_code == status
    assert named in answer.json()["detail"]


def test_unknown_requests_are_gone(wire: Wire) -> None:
    """An id that was never accepted, or is none, is answered 410: the SDK takes any other 4xx for a lost promise."""
    for request_id in (f"{wire.model}:7", "nonsense", f"{wire.model}:{'9' * 5000}"):
        assert wire.retrieve(request_id).status_code == 410


def test_a_model_tells_what_it_is(wire: Wire) -> None:
    """get_info of a created model; 404 for one that does not exist."""
    assert wire.post("get_info", {"model_id": wire.model}).status_code == 404
    wire.created()
    info = wire.post("get_info", {"model_id": wire.model}).json()
    assert info["model_data"]["model_name"] == tinymodel.NAME
    assert (info["model_id"], info["is_lora"], info["lora_rank"]) == (wire.model, True, 4)


def test_a_repeat_gets_the_original_answer(wire: Wire) -> None:
    """A number is taken once, whatever the repeat's body says; results are served again byte for byte."""
    wire.created()
    first = wire.forward_backward(1, texts(1, 2, 8))
    again = wire.forward_backward(1, texts(2, 1, 4))
    assert first.json() == again.json() == {"request_id": f"{wire.model}:1"}
    results = [wire.retrieve(f"{wire.model}:1") for _ in range(2)]
    assert [result.headers["content-type"] for result in results] == [PROTOBUF] * 2
    assert results[0].content == results[1].content
    output = tinker_public.ForwardBackwardOutput.FromString(results[0].content)
    assert "loss:sum" in output.metrics
    assert sum(record.num_datums for record in output.loss_fn_outputs) == 2


def test_compressed_bodies_mean_the_same(wire: Wire) -> None:
    """Compression of the request changes nothing in the result."""
    wire.created()
    plain = forward_backward_body(wire.model, 1, texts(1, 2, 8), forward_only=True)
    packed = forward_backward_body(wire.model, 2, texts(1, 2, 8), forward_only=True)
    wire.post_protobuf(plain)
    wire.post_protobuf(zstandard.compress(packed), **{"Content-Encoding": "zstd"})
    assert wire.retrieve(f"{wire.model}:1").content == wire.retrieve(f"{wire.model}:2").content


def test_bad_content_is_accepted_and_fails_under_its_number(wire: Wire) -> None:
    """The submit is answered, the future ends with error and category, and so it does each time it is asked for."""
    wire.created()
    assert wire.forward_backward(1, [[5, 6, 100_000]]).status_code == 200
    answers = [wire.retrieve(f"{wire.model}:1") for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert answers[0].status_code == 200
    assert answers[0].json()["category"] == "user"
    assert "data[0].loss_fn_inputs.target_tokens" in answers[0].json()["error"]


def test_an_early_arrival_waits_for_the_number_before_it(wire: Wire) -> None:
    """Number 2 is acknowledged at once, its poll is held, and it ends after number 1 came."""
    wire.created()
    assert wire.optim_step(2).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        polling = pool.submit(wire.retrieve, f"{wire.model}:2")
        with pytest.raises(concurrent.futures.TimeoutError):
            polling.result(timeout=0.5)
        wire.forward_backward(1, texts(1, 1, 8))
        assert "metrics" in polling.result(timeout=10).json()


def test_submits_are_answered_while_a_step_runs(pod: Pod, wire: Wire) -> None:
    """Acceptance takes milliseconds also while the engine computes."""
    wire.created()
    wire.forward_backward(1, texts(1, 512, 200))
    latencies = []
    for seq in range(2, 27):
        begun = time.perf_counter()
        wire.optim_step(seq)
        latencies.append(time.perf_counter() - begun)
        assert pod.get("/status").status_code == 200
    running = pod.get("/status").json()
    (model,) = [model for model in running["models"] if model["modelId"] == wire.model]
    assert model["seq"] == 0, "the step had ended before the last submit"
    print("submit_median_ms", round(1000 * statistics.median(latencies), 1))
    print("submit_max_ms", round(1000 * max(latencies), 1))
    assert statistics.median(latencies) < 0.05
    eventually(lambda: wire.retrieve(f"{wire.model}:1").status_code == 200, "the step ended", 60)


def test_the_server_never_imports_torch() -> None:
    """What the server process imports brings neither torch nor the tinker package, which would try to."""
    code = "import sys, everloop_trainer.wiring; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(REPOSITORY / "trainer_image")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"torch", "tinker", "transformers", "boto3"} & {name.split(".")[0] for name in modules}
