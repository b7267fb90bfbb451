"""The document of the wire: nothing that the gateway serves is left out, and nothing of the SDK's is lost in it."""

from __future__ import annotations

import pytest

from tests.wire.document import Document, document, field_names, operations, routes, sdk_calls, uncalled, unserved

UNSERVED = {
    "POST /api/v1/auth/token",
    "POST /api/v1/join_sampling_session",
    "GET /api/v1/sessions/session_id/trace_export",
    "PUT /api/v1/sessions/session_id/project",
}
"""What the gateway has no route for, as the page of conformance says."""
UNCALLED = {
    "/api/v1/downloads/{namespace}/{run_id}/{kind}/{name}/{key}/{file}",
    "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/archive",
    "/api/v1/sessions/{session_id}/finish",
}
"""What the SDK follows as a URL, an older one asks for, or it sends at the end of a session without a type."""


@pytest.fixture(scope="module")
def told() -> Document:
    """What the SDK says of itself."""
    return sdk_calls()


def test_calls_of_the_sdk_and_routes_of_the_gateway_find_each_other(told: Document) -> None:
    """A call that the SDK gains or loses, or a route that the gateway does, makes this fail."""
    assert unserved(told, routes()) == UNSERVED
    assert uncalled(told, routes()) == UNCALLED


def test_requests_are_the_sdks_own_types(told: Document) -> None:
    """Of a model, put together by hand, of a query, and of protobuf."""
    written = document(told, routes())
    found = dict(operations(written))

    def body(label: str) -> Document:
        content: Document = found[label]["requestBody"]["content"]
        return content

    sample = {"application/json": {"schema": {"$ref": "#/components/schemas/SampleRequest"}}}
    assert body("POST /api/v1/asample") == sample
    by_hand = body("PUT /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")["application/json"]["schema"]
    assert by_hand["properties"] == {"ttl_seconds": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    assert set(body("POST /api/v1/forward_backward")) == {"application/x-protobuf"}
    queried = {each["name"] for each in found["GET /api/v1/training_runs"]["parameters"]}
    assert queried == {"limit", "offset", "access_scope"}
    names = field_names(written)
    assert {"sparse_col_indices", "expected_tokens", "access_scope", "sampler_id", "tinker_path"} <= names
    assert "training_run_ids" not in names, "that is of an answer"
