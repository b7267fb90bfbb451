"""Anything at all in the requests of a gateway before a real server: refused by field, and nothing left behind.

`EVERLOOP_TEST_SEED` repeats a run; `EVERLOOP_TEST_WHOLE` makes it a long one.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, note, seed
from hypothesis import strategies as st

from everloop_operator.api import tokens
from tests.fuzz import answers, bodies, messages
from tests.fuzz.client import MODEL, OPERATIONS, QUESTIONS, SESSION, Client
from tests.fuzz.drawing import drawing, requests
from tests.gateway.world import MASTER, Cluster, GatewayProcess
from tests.networks import new_address
from tests.prepared import client_python
from tests.server import tinymodel
from tests.server.pod import Pod, process_of
from tests.server.sdk import SCRIPT
from tests.server.wire import forward_backward_body, texts
from tests.whole import only_whole

SEED = int(os.environ["EVERLOOP_TEST_SEED"])
GROWTH = 96 << 20
"""Bytes that a process may have more after any requests than before."""

CREATIONS = bodies.of_session(SESSION, tinymodel.NAME)
OWN: dict[str, bodies.Body] = {
    "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0", "type": "create_session"},
    "session_heartbeat": {"session_id": SESSION},
    "create_sampling_session": {
        "session_id": SESSION,
        "sampling_session_seq_id": 1,
        "base_model": tinymodel.NAME,
        "model_path": None,
    },
    "sessions/search": {"limit": 5, "cursor": None, "owner": {"type": "own"}, "session_id": SESSION},
    "telemetry": {"events": [{"type": "GENERIC_EVENT"}], "session_id": SESSION},
    "client/config": {"sdk_version": "0"},
    "copy_weights": {"source_path": f"tinker://{MODEL}/weights/a", "destination_project_id": "p"},
}
"""What the gateway answers by itself."""
UNKNOWN = {**QUESTIONS, "retrieve_future": {"request_id": f"{MODEL}:999"}}
"""Nothing waits for an engine."""
FIELDS = answers.ALSO_NAMED | answers.names(
    [body for group in (OPERATIONS, CREATIONS, QUESTIONS, OWN) for body in group.values()]
)


def memory(pid: int) -> int:
    """Bytes of a process that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def reaching(role: str, cluster: Cluster, gateway: GatewayProcess, directory: Path) -> Iterator[tuple[Client, str]]:
    """A client of a pod behind a gateway, and its key; in the end nothing is there that was not acknowledged."""
    tinymodel.write_tiny_model(directory / "model")
    tenant = cluster.tenant(base_model=tinymodel.NAME)
    key, token = cluster.key(tenant.namespace), tokens.session_token(bytes.fromhex(MASTER), tenant.uid, 1)
    pod = Pod(directory, new_address(), directory / "model", uid=str(uuid.uuid4()), token=token)
    try:
        pod.start(role)
        pod.wait_until("Starting" if role == "server" else "Serving")
        tenant.serve(SimpleNamespace(uid=pod.uid, ip=pod.ip, attempt=1))  # type: ignore[arg-type]  # all that it reads
        with gateway.session(key) as (http, session):
            client = Client(http, session, FIELDS)
            first = bodies.text(CREATIONS["create_model"]).replace(f'"{bodies.NUMBER}"', "0")
            assert client.post("create_model", first).status_code == 200
            assert client.post("create_sampling_session", bodies.text(OWN["create_sampling_session"])).is_success
            server = pod.container.pid if role == "server" else process_of(pod, "server")
            before = [memory(pid) for pid in (gateway.process.pid, server)]
            yield client, key
            grown = [memory(pid) - size for pid, size in zip((gateway.process.pid, server), before, strict=True)]
            print("gateway and server grew by MiB", [size >> 20 for size in grown])
            assert max(grown) < GROWTH, grown
            assert not gateway.logged("session pod fails", pod.uid)
            accepted = [f"{each['s']}:{each['n']}" for each in pod.journal() if each["t"] == "accept"]
            ours = [request for request in accepted if request.startswith(session)]
            assert sorted(ours) == sorted(client.acknowledged), "what is refused leaves nothing behind"
    finally:
        pod.end()


@pytest.fixture(scope="module")
def client(cluster: Cluster, gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a server without an engine, which takes in everything and runs nothing."""
    with reaching("server", cluster, gateway, tmp_path_factory.mktemp("fuzz")) as (client, _):
        yield client


@seed(SEED)
@drawing(120)
@given(request=st.one_of(*map(requests, (OPERATIONS, CREATIONS, UNKNOWN, OWN))))
def test_any_json_is_answered(client: Client, request: tuple[str, str]) -> None:
    """No defect, in time, each refusal names its field; what is acknowledged is in the journal, and nothing else."""
    note(f"EVERLOOP_TEST_SEED={SEED}")
    client.post(*request)


VALID = [forward_backward_body(MODEL, 0, texts(index, 2, 6)) for index in range(2)]


@seed(SEED)
@drawing(60)
@given(body=st.sampled_from(VALID).flatmap(messages.broken) | st.sampled_from(VALID))
def test_any_protobuf_is_answered(client: Client, body: bytes) -> None:
    """As JSON."""
    note(f"EVERLOOP_TEST_SEED={SEED} {body.hex()}")
    client.post_protobuf(body)


JUNK = ("-1", "1e9", "x" * 300, "%00", "%ff", "..%2f..", "a b", "\u00e9", "9" * 30, "", "tinker://a/b/c")


@seed(SEED)
@drawing(40)
@given(
    path=st.sampled_from(
        ("training_runs", "checkpoints", "sessions", "sessions/{}", "samplers/{}", "training_runs/{}")
        + ("training_runs/{}/checkpoints", "training_runs/{}/checkpoints/weights/{}", "{}")
    ),
    junk=st.sampled_from(JUNK),
    method=st.sampled_from(("GET", "GET", "DELETE", "PUT", "POST", "PATCH", "HEAD")),
    query=st.dictionaries(st.sampled_from(("limit", "offset", "access_scope", "cursor")), st.sampled_from(JUNK)),
    repeat=st.sampled_from(("", "a", "x" * 2000, "\u00e9")),
)
def test_any_path_is_answered(
    client: Client, path: str, junk: str, method: str, query: dict[str, str], repeat: str
) -> None:
    """Whatever stands in it, its query and its headers."""
    note(f"EVERLOOP_TEST_SEED={SEED}")
    headers = {b"x-idempotency-key": repeat.encode()}
    answer = client.http.request(method, f"/{path.format(*(junk,) * 3)}", params=query, headers=headers)
    assert answer.status_code < 500, answer.text
    assert answer.elapsed.total_seconds() < answers.LONGEST_SECONDS


@pytest.mark.parametrize(
    ("name", "body", "status", "named"),
    [
        ("asample", b'{"a": [' + b"[]," * (5 << 20) + b"[]]}", 400, "body"),
        ("asample", b'{"a": [' + b'"ab",' * (3 << 20) + b'""]}', 400, "body"),
        ("asample", b'{"a": "' + b"a" * (16 << 20) + b'"}', 413, "body"),
        ("optim_step", b'{"a": "' + b"a" * (4 << 20) + b'"}', 413, "body"),
        ("forward_backward", b"\x1a\x00" * (16 << 20), 400, "data"),
        ("forward_backward", b"\x0a\x01a" + b"\x80" * (16 << 20), 400, "body"),
    ],
)
def test_what_decodes_into_far_more_is_refused_at_once(
    client: Client, gateway: GatewayProcess, name: str, body: bytes, status: int, named: str
) -> None:
    """It takes neither memory nor the time of others."""
    before = memory(gateway.process.pid)
    kind = "application/x-protobuf" if name == "forward_backward" else "application/json"
    answer = client.http.post(f"/{name}", content=body, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (status, named)
    assert memory(gateway.process.pid) - before < GROWTH
    begun = time.monotonic()
    assert client.http.post("/client/config").status_code == 200
    assert time.monotonic() - begun < answers.LONGEST_SECONDS


def trained(url: str, key: str) -> list[float]:
    """The losses of a loop of the SDK in a process of its own."""
    environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0", "PATH": os.environ["PATH"]}
    arguments = json.dumps({"seed": 3, "steps": 5, "sequences": 4, "length": 16})
    done = subprocess.run(
        [client_python(), str(SCRIPT), "train", arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [event["loss"] for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "step"]


@only_whole
def test_a_loop_after_all_that_equals_one_before(cluster: Cluster, gateway: GatewayProcess, tmp_path: Path) -> None:
    """With a real engine, in which everything that was acknowledged ends, well or by the client's fault."""
    with reaching("supervisor", cluster, gateway, tmp_path) as (client, key):
        before = trained(gateway.url, key)

        @seed(SEED)
        @drawing(50)
        @given(
            request=st.one_of(*map(requests, (OPERATIONS, QUESTIONS, OWN))),
            body=st.sampled_from(VALID).flatmap(messages.broken),
        )
        def anything(request: tuple[str, str], body: bytes) -> None:
            note(f"EVERLOOP_TEST_SEED={SEED} {body.hex()}")
            client.post(*request)
            client.post_protobuf(body)

        anything()
        ended = client.ended()
        print(len(ended), "operations ended,", sum(error is None for error in ended.values()), "of them well")
        assert {None} < set(ended.values())
        assert trained(gateway.url, key) == before
