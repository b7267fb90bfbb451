"""Anything at all in the requests of a session pod: refused by field or ended as an operation, and nothing left behind.

`EVERLOOP_TEST_SEED` repeats a run; `EVERLOOP_TEST_WHOLE` makes it a long one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest
from hypothesis import example, given, note, seed
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from everloop_trainer.server import bodies as reading
from everloop_trainer.server import submissions
from everloop_trainer.session.operations import Operation, Refused, arguments_from_json, arguments_to_json
from everloop_trainer.session.records import Accept, is_readable
from tests.fuzz import answers, bodies, messages
from tests.fuzz.client import MODEL, OPERATIONS, QUESTIONS, SESSION, Client
from tests.fuzz.drawing import drawing, requests
from tests.server import tinymodel
from tests.server.pod import Pod, eventually
from tests.server.wire import Wire, forward_backward_body, texts

SEED = int(os.environ["EVERLOOP_TEST_SEED"])
READERS = {
    "optim_step": submissions.optim_step,
    "save_weights": submissions.save_weights,
    "save_weights_for_sampler": submissions.save_weights_for_sampler,
    "save_weights_external": submissions.save_weights_external,
    "load_weights": lambda body: submissions.load_weights(body, body.get("path")),
    "asample": lambda body: submissions.sample(body, "base"),
    "create_model": submissions.create_model,
}
CREATIONS = bodies.of_session(SESSION, tinymodel.NAME)
FIELDS = answers.names([*OPERATIONS.values(), *CREATIONS.values(), *QUESTIONS.values()]) | answers.ALSO_NAMED


@seed(SEED)
@drawing(200)
@given(requests(OPERATIONS) | requests(CREATIONS))
def test_a_body_is_no_operation_or_one_that_can_be_read_back(request: tuple[str, str]) -> None:
    """Whatever is accepted is in the journal as it was meant; a refusal, at once or later, names its field."""
    name, text = request
    text = text.replace(f'"{bodies.NUMBER}"', "1")
    note(f"EVERLOOP_TEST_SEED={SEED} {name} {text[:2000]}")
    try:
        body = reading.json_object(text.encode())
        operation: Operation = READERS[name](body)
    except (HTTPException, submissions.Undecodable) as refused:
        detail = refused.detail if isinstance(refused, HTTPException) else str(refused)
        assert answers.names_a_field(detail, FIELDS), detail
        return
    args = operation.args
    assert is_readable(Accept(operation.stream, operation.seq, args, "2030-01-01T00:00:00Z"))
    assert arguments_from_json(args.KIND, json.loads(json.dumps(arguments_to_json(args)))) == args
    if isinstance(args, Refused):
        assert answers.names_a_field(args.error, FIELDS), args.error


@pytest.fixture(scope="module")
def client(pod: Pod) -> Iterator[Client]:
    """One client of the running pod for all examples; in the end the pod has what it was promised, and serves."""
    wire = Wire(pod).created()
    before = eventually(pod.status, "a status")
    with httpx.Client(base_url=f"{pod.url}/api/v1", headers=pod.headers, timeout=60) as http, closing(wire.client):
        client = Client(http, wire.session, FIELDS, {"x-everloop-weights": "base"}, {f"{wire.model}:0"})
        yield client
        assert {None} < set(client.ended().values()), "some go well, others don't"
        # Whatever has become of gradients until now, these are those of the step after them.
        turn = client.next(client.model)
        client.take(wire.optim_step(turn))
        client.take(wire.forward_backward(turn + 1, texts(1, 1, 8)))
        client.take(wire.optim_step(turn + 2))
        ended = client.ended()
        assert [ended[f"{client.model}:{turn + each}"] for each in (1, 2)] == [None, None]
        after = eventually(pod.status, "a status")
        assert before["engine"]["pid"] == after["engine"]["pid"], "an engine died of it"
        ours = {request.rpartition(":")[0] for request in client.acknowledged}
        accepted = [f"{each['s']}:{each['n']}" for each in pod.journal() if each["t"] == "accept" and each["s"] in ours]
        assert sorted(accepted) == sorted(client.acknowledged), "what is refused leaves nothing behind"


@seed(SEED)
@drawing(100)
@given(request=requests(OPERATIONS) | requests(QUESTIONS))
def test_any_json_is_answered(client: Client, request: tuple[str, str]) -> None:
    """By the pod: no defect, in time, each refusal names its field."""
    note(f"EVERLOOP_TEST_SEED={SEED}")
    client.post(*request)


VALID = [forward_backward_body(MODEL, 0, texts(index, 2, 6), forward_only=index == 1) for index in range(2)]


@seed(SEED)
@drawing(100)
@given(body=st.sampled_from(VALID).flatmap(messages.broken))
@example(body=VALID[0])
def test_any_protobuf_is_answered(client: Client, body: bytes) -> None:
    """As JSON; what can be addressed is accepted, and ends well or with the field that is wrong."""
    note(f"EVERLOOP_TEST_SEED={SEED} {body.hex()}")
    client.post_protobuf(body)
