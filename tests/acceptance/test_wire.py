"""Requests drawn from the document of the wire, by schemathesis: what holds for any answer, and nothing is left behind.

`EVERLOOP_TEST_SEED` repeats a run.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.stack import Stack, serving
from tests.fuzz import answers, bodies
from tests.fuzz.client import OPERATIONS, QUESTIONS, SESSION, Client
from tests.gateway.test_custom_losses import request as loss
from tests.gateway.test_fuzz import CREATIONS, GROWTH, OWN, memory, trained
from tests.prepared import environment_python
from tests.server import tinymodel
from tests.server.pod import REPOSITORY, Pod, process_of
from tests.server.wire import forward_backward_body, texts
from tests.whole import only_whole
from tests.wire.document import Document, document, field_names, operations, own_fields, routes, sdk_calls

pytestmark = only_whole

SEED = int(os.environ["EVERLOOP_TEST_SEED"])
DRAWN = 40
"""Requests of each operation, beside those that follow from its types and its example."""
LONGEST_RUN_SECONDS = 3600.0
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
ADDRESS = {"session_id", "model_id", "sampling_session_id", "seq_id", "model_seq_id"}
"""Fields that say which operation of which stream is meant."""
NEVER_DONE = {
    "GET /api/v1/downloads/{namespace}/{run_id}/{kind}/{name}/{key}/{file}",
}
"""Nobody guesses a URL."""
NUMBERED = ("create_model", "load_weights", "forward_backward", "optim_step", "asample", *SAVES)
"""Accepted whatever they hold, and failed by what is wrong in them."""
UNREAD = ("client/config", "client/dynamic_config", "telemetry", "create_session", "sessions/{session_id}/finish")
"""Nothing that they hold is kept."""
NARROWER = (
    *("session_id", "model_id", "sampling_session_id", "sampler_id", "training_run_id", "request_id", "base_model"),
    *("path", "tinker_path", "model_path", "target", "checkpoint", "cursor", "owner", "mac"),
    *("source_path", "project_id", "destination_project_id"),
    *("seq_id", "model_seq_id", "sampling_session_seq_id", "custom_loss_seq_id", "prev_cursor", "timeout"),
    *("limit", "offset", "ttl_seconds"),
    *("user_metadata", "display_name", "statuses", "project_ids", "name", "inputs", "graph"),
)
"""What a refusal may be about although the SDK's types allow it.

Whether something is there, what numbers and traced losses may be, and what sessions cannot be found by.
"""
SETTINGS = f"""
[headers]
X-API-Key = "${{TINKER_API_KEY}}"

[checks]
enabled = false
max_response_time = {answers.LONGEST_SECONDS}
not_a_server_error.enabled = true
status_code_conformance.enabled = true
content_type_conformance.enabled = true
response_schema_conformance.enabled = true
ignored_auth.enabled = true
negative_data_rejection.enabled = true
refusal_names_a_field.enabled = true

[[operations]]
include-path = {json.dumps([f"/api/v1/{name}" for name in (*NUMBERED, *UNREAD)])}
checks.negative_data_rejection.enabled = false
"""
"""Of schemathesis."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Gateway and session pod, with an engine that has little to do."""
    place = tmp_path_factory.mktemp("wire")
    tinymodel.write_tiny_model(place / "model")

    def roomy(pod: Pod) -> None:
        pod.configure(adapters={"maxModels": 256, "maxRank": 32})

    with serving(place, tinymodel.NAME, place / "model", tinymodel.MAX_LENGTH // 2, roomy) as stack:
        yield stack


def with_something_of_each(client: Client) -> None:
    """Make a model that was trained, a sampler that has sampled, and checkpoints of each kind, `gone` among them."""
    client.post("create_model", bodies.text(CREATIONS["create_model"]).replace(f'"{bodies.NUMBER}"', "0"))
    assert client.post("create_sampling_session", bodies.text(OWN["create_sampling_session"])).is_success
    client.post_protobuf(forward_backward_body(client.model, 0, texts(1, 2, 6)))
    for name, body in OPERATIONS.items():
        client.post(name, bodies.text(body))
    client.post("save_weights", bodies.text({**OPERATIONS["save_weights"], "path": "gone"}))
    assert set(client.ended().values()) == {None}


def examples(session: str, project: str) -> dict[str, Any]:
    """A right body of each call that takes JSON and is not told apart by a path, by its name."""
    right = {**QUESTIONS, **OWN, **OPERATIONS, "create_model": CREATIONS["create_model"]}
    right |= {"create_custom_loss": loss(SESSION)}
    right["copy_weights"] = {**OWN["copy_weights"], "destination_project_id": project}
    text = bodies.text(right).replace(SESSION, session).replace(f'"{bodies.NUMBER}"', "1")
    found: dict[str, Any] = json.loads(text)
    return found


def given(client: Client, written: Document, log: Path) -> dict[str, Any]:
    """What the hooks of schemathesis are told."""
    path = f"tinker://{client.model}/weights/a"
    samplers = [client.sampler]
    return {
        "known": {
            "session_id": [client.session],
            "model_id": [client.model],
            "sampling_session_id": samplers,
            "request_id": [f"{client.model}:0", f"{client.sampler}:1"],
            "base_model": [tinymodel.NAME],
            "tinker_path": [path],
            "model_path": [path],
            "POST /api/v1/load_weights path": [path],
        },
        "in_paths": {
            "session_id": [client.session],
            "run_id": [client.model],
            "sampler_id": samplers,
            "kind": ["weights", "sampler_weights"],
            "name": ["a"],
            "DELETE /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name} name": ["gone"],
        },
        "protobuf": [forward_backward_body(client.model, 0, texts(index, 2, 6)).hex() for index in range(2)],
        "addresses": {label: sorted(ADDRESS & own_fields(written, each)) for label, each in operations(written)},
        "fields": sorted(field_names(written)),
        "narrower": sorted(NARROWER),
        "log": str(log),
    }


def drawn_at_random(stack: Stack, place: Path, client: Client, written: Document) -> list[dict[str, Any]]:
    """All that schemathesis has sent, and how it was answered; it has nothing to complain of."""
    log = place / "log"
    (place / "document.json").write_text(json.dumps(written))
    (place / "given.json").write_text(json.dumps(given(client, written, log)))
    (place / "schemathesis.toml").write_text(SETTINGS)
    command = [str(Path(environment_python("schemathesis")).with_name("st")), "run", "document.json"]
    command += ["--url", stack.gateway.url, "--phases", "examples,coverage,fuzzing"]
    command += ["--seed", str(SEED), "--max-examples", str(DRAWN), "--no-shrink", "--continue-on-failure"]
    command += ["--warnings", "off"]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SCHEMATHESIS_HOOKS": "tests.wire.hooks",
        "EVERLOOP_WIRE": str(place / "given.json"),
        "TINKER_API_KEY": stack.key,
    }
    print(f"EVERLOOP_TEST_SEED={SEED}")
    done = subprocess.run(
        command, env=environment, cwd=place, capture_output=True, text=True, timeout=LONGEST_RUN_SECONDS
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    return [json.loads(line) for line in log.read_text().splitlines()]


def check_nothing_is_left_of_refusals(stack: Stack, client: Client, sent: list[dict[str, Any]]) -> None:
    """The journal has what was acknowledged, and what is bound was, too."""
    journal = stack.pod.journal()
    accepted = {f"{each['s']}:{each['n']}" for each in journal if each["t"] == "accept"}
    copies = {each["run"] for each in journal if each["t"] == "copied"}
    assert client.acknowledged <= accepted  # some are of sessions that were drawn, too
    assert {request for request in accepted if request.startswith(client.session)} <= client.acknowledged
    made = {request.rpartition(":")[0] for request in client.acknowledged} | {each["sampler"] for each in sent}
    bound = {binding["data"]["id"] for binding in stack.tenant.bindings()}
    assert {stream for stream in bound if stream.startswith(client.session)} <= made | copies | {client.sampler}


def check_all_ends(client: Client) -> None:
    """Well, or by the client's fault, which is named: operations, and the making of further models."""
    ended = client.ended()
    made = {request for request in client.acknowledged if request.endswith(":0") and request not in ended}
    for request in made:
        ended[request] = answers.outcome(client.http.post("/retrieve_future", json={"request_id": request}))
        error = ended[request]
        assert error is None or answers.names_a_field(error, client.fields), (request, error)
    assert set(ended) == client.acknowledged
    print(len(ended), "operations ended,", sum(error is None for error in ended.values()), "of them well")


def test_whatever_the_document_allows_or_forbids_is_answered(stack: Stack, tmp_path: Path) -> None:
    """In time, without a defect, by field where refused; what was acknowledged ends, and a loop goes as before."""
    before = trained(stack.gateway.url, stack.key)
    with stack.gateway.session(stack.key) as (http, session):
        written = document(sdk_calls(), routes(), examples(session, stack.tenant.namespace))
        client = Client(http, session, answers.ALSO_NAMED | answers.names([]) | field_names(written))
        with_something_of_each(client)
        processes = stack.gateway.process.pid, process_of(stack.pod, "server")
        sizes = [memory(pid) for pid in processes]
        sent = drawn_at_random(stack, tmp_path, client, written)
        grown = [memory(pid) - size for pid, size in zip(processes, sizes, strict=True)]
        print("of", len(sent), "requests by status", Counter(each["status"] for each in sent))
        print("gateway and server grew by MiB", [size >> 20 for size in grown])
        assert max(grown) < GROWTH, grown
        done = {each["operation"] for each in sent if each["status"] < 300}
        assert {label for label, _ in operations(written)} - done == NEVER_DONE
        client.acknowledged |= {each["request_id"] for each in sent if each["request_id"]}
        check_nothing_is_left_of_refusals(stack, client, sent)
        check_all_ends(client)
    assert trained(stack.gateway.url, stack.key) == before
