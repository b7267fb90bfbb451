"""Identifiers, request bodies, keys and settings: pure functions."""

from __future__ import annotations

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from everloop_gateway import ids, keys, settings, wire
from everloop_operator.api import tokens
from tests.gateway.fake_pod import wire_schema

SESSION = "s-0123456789abcdef-fedcba9876543210"
MASTER = bytes(range(32))
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def test_streams_are_built_and_taken_apart() -> None:
    """The ids are those that the SDK computes by itself."""
    model = ids.Stream(SESSION, "train", 3)
    assert model.id == f"{SESSION}:train:3"
    assert ids.parse_stream(model.id, "model_id", "train") == model
    assert ids.parse_request_id(f"{SESSION}:sample:0:17") == ids.Stream(SESSION, "sample", 0)
    assert ids.parse_tinker_path(f"tinker://{SESSION}:train:3/weights/a.b_C-1", "path") == model
    assert model.binding_name == "evb-" + hashlib.sha256(model.id.encode()).hexdigest()[:20]


@pytest.mark.parametrize(
    "text",
    ["", SESSION, f"{SESSION}:train", f"{SESSION}:train:-1", f"{SESSION}:train:01", f"{SESSION}:other:1", "a:train:1"],
)
def test_what_was_never_given_out_is_malformed(text: str) -> None:
    """Each message names its field."""
    with pytest.raises(ids.MalformedId, match=r"^model_id: "):
        ids.parse_stream(text, "model_id")
    with pytest.raises(ids.MalformedId, match="request_id: "):
        ids.parse_request_id(text)
    with pytest.raises(ids.MalformedId, match="model_path: "):
        ids.parse_tinker_path(f"tinker://{text}/weights/x", "model_path")


def test_a_sampling_session_is_no_model() -> None:
    """The kind is part of the id."""
    with pytest.raises(ids.MalformedId):
        ids.parse_stream(f"{SESSION}:sample:0", "model_id", "train")


@pytest.mark.parametrize(
    "path",
    [
        "weights/x",
        f"tinker://{SESSION}:train:0/weights",
        f"tinker://{SESSION}:train:0/w/x/y",
        f"tinker://{SESSION}:train:0/weights/a b",
        f"tinker://{SESSION}:train:0/weights/a\r\nb: c",
        f"tinker://{SESSION}:train:0/weights/\u00e9",
        f"tinker://{SESSION}:train:0/weights/..",
    ],
)
def test_a_path_has_three_segments_fit_for_a_header(path: str) -> None:
    """Nothing else is a checkpoint."""
    with pytest.raises(ids.MalformedId, match="model_path"):
        ids.parse_tinker_path(path, "model_path")


@given(st.text(max_size=300), st.integers(0, 2**31 - 1), st.integers(0, 5))
def test_the_model_id_of_a_real_protobuf_body_is_found(model_id: str, seq_id: int, datums: int) -> None:
    """Against the SDK's own schema."""
    message = schema().ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(datums):
        message.data.add().model_input.add().encoded_text.tokens = b"\1\0\0\0"
    body = message.SerializeToString()
    if seq_id:
        assert wire.protobuf_seq_id(body) == seq_id
    else:
        with pytest.raises(wire.UndecodableBody, match="seq_id"):
            wire.protobuf_seq_id(body)
    if model_id:
        assert wire.protobuf_model_id(body) == model_id
    else:
        with pytest.raises(wire.UndecodableBody, match="model_id"):
            wire.protobuf_model_id(body)


def schema(found: list[Any] = []) -> Any:  # noqa: B006 (a cache)
    if not found:
        found.append(wire_schema())
    return found[0]


@given(st.binary(max_size=64))
def test_any_other_bytes_are_refused_or_read_and_never_break(body: bytes) -> None:
    """Untrusted input ends in a text or in one kind of error."""
    try:
        assert isinstance(wire.protobuf_model_id(body), str)
    except wire.UndecodableBody:
        pass


FRAGMENTS = [
    b"\x0a\x01a",
    b"\x0a\x01b",
    b"\x0a\x00",
    b"\x8a\x00\x01c",
    b"\x8a\x80\x80\x80\x10\x01d",
    b"\x10\x05",
    b"\x08\x01",
]
FRAGMENTS += [b"\x1a\x00", b"\x7a\x02xy", b"\x0b", b"\x0c", b"\x0d\0\0\0\0", b"\x8a\x80\x80\x80\x80\x00\x01e", b"\xff"]


@given(st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=4), max_size=6).map(b"".join))
def test_the_model_that_is_authorized_is_the_one_that_the_pod_reads(body: bytes) -> None:
    """Whatever a body says twice or oddly, gateway and protobuf agree on the model, or the gateway refuses."""
    try:
        found = wire.protobuf_model_id(body)
    except wire.UndecodableBody:
        return
    try:
        read = schema().ForwardBackwardRequest.FromString(body).model_id
    except DecodeError:
        return
    assert found == read


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"\x0a\x01a\x0a\x01b", "b"),
        (b"\x10\x05\x0a\x02ab", "ab"),
        (b"\x15\0\0\0\0\x19\0\0\0\0\0\0\0\0\x0a\x01a", "a"),
        (b"\x12\x01x\x0a\x01a", "a"),
    ],
)
def test_the_last_model_id_is_found_among_other_fields(body: bytes, found: str) -> None:
    """Protobuf promises no order, and lets a field come twice."""
    assert wire.protobuf_model_id(body) == found


@pytest.mark.parametrize("body", [b"", b"\x0a", b"\x0a\x05ab", b"\x0a\x01\xff", b"\x0b", b"\xff" * 11, b"\x02\x01a"])
def test_a_broken_protobuf_body_is_undecodable(body: bytes) -> None:
    """Truncated, not UTF-8, unknown wire type, endless number, field 0."""
    with pytest.raises(wire.UndecodableBody):
        wire.protobuf_model_id(body)


@pytest.mark.parametrize("value", [None, -1, 1.0, "1", True, 10**18])
def test_a_number_is_an_integer(value: object) -> None:
    """JSON has looser ideas of numbers than streams have."""
    with pytest.raises(wire.UndecodableBody, match="model_seq_id"):
        wire.number_of_session({"model_seq_id": value}, "model_seq_id")


@pytest.mark.parametrize("value", [None, 0, -1, 1.0, "1", True, 2**63])
def test_an_operation_has_a_number_that_its_pod_takes(value: object) -> None:
    """Those of a model count from 1 and fit 64 bits."""
    with pytest.raises(wire.UndecodableBody, match="seq_id"):
        wire.seq_id({"seq_id": value})
    assert wire.seq_id({"seq_id": 2**63 - 1}) == 2**63 - 1


def as_stored(manifest: dict[str, Any]) -> dict[str, Any]:
    data = {field: base64.b64encode(text.encode()).decode() for field, text in manifest["stringData"].items()}
    return {"metadata": manifest["metadata"], "data": data}


def test_a_minted_key_opens_its_namespace_until_it_expires() -> None:
    """Manifest, record and check agree; the key itself is nowhere in the manifest."""
    key, manifest = keys.mint("team", "ann", "system", NOW + timedelta(days=1), bytes(range(38)))
    record = keys.record_from_secret(as_stored(manifest))
    assert keys.key_id_of(key) == record.key_id == "000102030405"
    assert keys.authenticate(key, record, NOW) == keys.Principal("team", record.key_id, "ann")
    assert key.rpartition("-")[2] not in str(manifest)
    assert (manifest["metadata"]["name"], manifest["metadata"]["namespace"]) == ("key-000102030405", "system")
    with pytest.raises(keys.Unauthorized, match="expired"):
        keys.authenticate(key, record, NOW + timedelta(days=1))
    other, _ = keys.mint("team", "ann", "system", None, bytes(range(6)) + bytes(32))
    for wrong, known in ((other, record), (key, None)):
        with pytest.raises(keys.Unauthorized, match="unknown"):
            keys.authenticate(wrong, known, NOW)


@pytest.mark.parametrize("key", ["", "tml-", "tml-0123456789ab-short", "tml-0123456789AB-" + "x" * 43, "eyJhbGciOi"])
def test_what_does_not_look_like_a_key_is_none(key: str) -> None:
    """Without a look at any record."""
    with pytest.raises(keys.Unauthorized):
        keys.key_id_of(key)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sha256", "abc"),
        ("sha256", "Z" * 64),
        ("namespace", ""),
        ("expires", "soon"),
        ("expires", "2030-01-01T00:00:00"),
    ],
)
def test_a_secret_that_is_no_key_is_refused_by_field_without_its_content(field: str, value: str) -> None:
    """A broken Secret opens nothing, and its content does not get into the log."""
    _, manifest = keys.mint("team", "ann", "system", None, bytes(38))
    manifest["stringData"][field] = value
    with pytest.raises(keys.InvalidKeySecret, match=f"key-000000000000: {field}") as caught:
        keys.record_from_secret(as_stored(manifest))
    assert not value or value not in str(caught.value)


def test_session_ids_are_repeatable_and_bound_to_their_key() -> None:
    """The same idempotency key gives the same id; no other namespace, key or master verifies it."""
    session_id = tokens.session_id(MASTER, "team", "0123456789ab", "repeat-1")
    assert session_id == tokens.session_id(MASTER, "team", "0123456789ab", "repeat-1")
    assert session_id != tokens.session_id(MASTER, "team", "0123456789ab", "repeat-2")
    assert tokens.SESSION_ID_PATTERN.fullmatch(session_id)
    assert tokens.verify_session_id(MASTER, "team", "0123456789ab", session_id)
    for master, namespace, key_id, text in (
        (MASTER[::-1], "team", "0123456789ab", session_id),
        (MASTER, "other", "0123456789ab", session_id),
        (MASTER, "team", "ba9876543210", session_id),
        (MASTER, "team", "0123456789ab", session_id[:-1] + ("0" if session_id[-1] != "0" else "1")),
        (MASTER, "team", "0123456789ab", "s-"),
    ):
        assert not tokens.verify_session_id(master, namespace, key_id, text)


def test_a_session_token_is_of_one_attempt() -> None:
    """HMAC-SHA256 over the words of the contract."""
    expected = hmac.new(MASTER, b"session-token|uid-1|3", hashlib.sha256).hexdigest()
    assert tokens.session_token(MASTER, "uid-1", 3) == expected
    assert tokens.session_token(MASTER, "uid-1", 4) != expected


@pytest.mark.parametrize("text", ["", "00" * 31, "zz" * 32])
def test_a_master_key_that_is_none_is_refused(text: str) -> None:
    """Without showing it."""
    with pytest.raises(ValueError, match="everloop-master"):
        tokens.master_key(text)


def test_settings_come_from_the_environment() -> None:
    """Required and optional variables."""
    found = settings.from_environment(
        {"POD_IP": "127.0.0.5", "EVERLOOP_RELEASE_NAMESPACE": "system", "EVERLOOP_NAMESPACES": "a, b"}
    )
    assert found == settings.Settings("127.0.0.5", "system", ("a", "b"), "INFO", metrics=False)
    for variable in ("METRICS", "BATCHED_POLLS", "STAND_INS"):
        switched = {"POD_IP": "127.0.0.5", "EVERLOOP_RELEASE_NAMESPACE": "system", f"EVERLOOP_{variable}": "true"}
        on = settings.from_environment(switched)
        assert [name for name in ("metrics", "batched_polls", "stand_ins") if getattr(on, name)] == [variable.lower()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POD_IP", ""),
        ("POD_IP", "0.0.0.0"),
        ("POD_IP", "::"),
        ("POD_IP", "localhost"),
        ("EVERLOOP_RELEASE_NAMESPACE", ""),
        ("EVERLOOP_LOG_LEVEL", "LOUD"),
        ("EVERLOOP_STAND_INS", "yes"),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, value: str) -> None:
    """Above all, the gateway never listens on all addresses."""
    with pytest.raises(settings.InvalidSettings, match=name):
        settings.from_environment({"POD_IP": "127.0.0.5", "EVERLOOP_RELEASE_NAMESPACE": "system", name: value})


def test_no_source_binds_all_addresses() -> None:
    """The words themselves must not be there."""
    package = Path(settings.__file__).parent
    assert not [path for path in package.glob("*.py") if "0.0.0.0" in path.read_text()]
