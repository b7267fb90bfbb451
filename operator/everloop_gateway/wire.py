"""Reading as much of a request body as routing needs, and no more. Pure functions over bytes.

The gateway's image has no protobuf runtime: of a ``ForwardBackwardRequest`` it needs two fields only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everloop_http import json_bodies

PREFIX = "/api/v1"
JSON = "application/json"
PROTOBUF = "application/x-protobuf"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_ID_FIELD, _SEQ_ID_FIELD = 1, 2
_GREATEST_FIELD = 2**29 - 1
_MAX_VARINT_BYTES = 10
MOST_FIELDS = 2**14
"""Of one message: sequences of a forward_backward, above all, of which the SDK is told to send 128."""


class UndecodableBody(ValueError):
    """The body is not what its content type says, or lacks a field that routing needs; the message names it."""


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises UndecodableBody."""
    try:
        value = json_bodies.parse(body)
    except json_bodies.UnreadableJson as error:
        raise UndecodableBody(str(error)) from None
    if not isinstance(value, dict):
        raise UndecodableBody("body: not a JSON object")
    return value


def text_field(value: dict[str, Any], name: str) -> str:
    """A required non-empty string. Raises UndecodableBody."""
    found = value.get(name)
    if not isinstance(found, str) or not found:
        raise UndecodableBody(f"{name}: a non-empty string is required")
    return found


def optional_text_field(value: dict[str, Any], name: str) -> str | None:
    """A string, or None where absent or null. Raises UndecodableBody."""
    return None if value.get(name) is None else text_field(value, name)


def check_type(value: dict[str, Any], name: str) -> None:
    """Which call a body is of, where it says so. Raises UndecodableBody."""
    if value.get("type", name) != name:
        raise UndecodableBody(f"type: must be {name!r} here")


def number_of_session(value: dict[str, Any], name: str) -> int:
    """Which of its session a model or sampling session is. Raises UndecodableBody."""
    return _number(value, name, 0, json_bodies.MOST_OF_A_SESSION - 1)


def seq_id(value: dict[str, Any]) -> int:
    """The number of an operation of a model, as a session pod takes it. Raises UndecodableBody."""
    return _number(value, "seq_id", 1, json_bodies.LARGEST)


def _number(value: dict[str, Any], name: str, least: int, most: int) -> int:
    found = value.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
        raise UndecodableBody(f"{name}: an integer from {least} to {most} is required")
    return found


def protobuf_model_id(body: bytes) -> str:
    """Field 1 (model_id, string) of a serialized tinker_public.ForwardBackwardRequest.

    Where it is given more than once the last counts, as for any reader of protobuf: what is authorized here must be
    what the session pod reads. Raises UndecodableBody.
    """
    model_id = b""
    for field, value in _fields(body):
        if field == _MODEL_ID_FIELD and isinstance(value, slice):
            model_id = body[value]
    if not model_id:
        raise UndecodableBody("model_id: a non-empty string is required")
    try:
        return model_id.decode()
    except UnicodeDecodeError:
        raise UndecodableBody("model_id: not UTF-8") from None


def protobuf_seq_id(body: bytes) -> int:
    """Field 2 (seq_id, int32) of the same message. Raises UndecodableBody."""
    numbers = [value for field, value in _fields(body) if field == _SEQ_ID_FIELD and isinstance(value, int)]
    return seq_id({"seq_id": numbers[-1] if numbers else None})


def _fields(body: bytes) -> Iterator[tuple[int, int | slice | None]]:
    """Each field of a message with its number, or where its bytes are; None for one of fixed length."""
    position = count = 0
    while position < len(body):
        count += 1
        if count > MOST_FIELDS:
            raise UndecodableBody(f"data: more than {MOST_FIELDS} fields in one request; send it in several")
        tag, position = _varint(body, position)
        field, wire_type = tag >> 3, tag & 7
        value: int | slice | None = None
        if wire_type == _BYTES:
            length, position = _varint(body, position)
            end = position + length
            value = slice(position, end)
        elif wire_type == _VARINT:
            value, end = _varint(body, position)
        elif wire_type in (_FIXED64, _FIXED32):
            end = position + (8 if wire_type == _FIXED64 else 4)
        else:
            raise UndecodableBody(f"body: not protobuf: wire type {wire_type} at byte {position}")
        if not 0 < field <= _GREATEST_FIELD or end > len(body):
            raise UndecodableBody("body: not protobuf: it ends within a field")
        yield field, value
        position = end


def _varint(body: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(body):
            break
        byte = body[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise UndecodableBody(f"body: not protobuf: no number at byte {position}")
