"""Messages on an engine's socket: `u32 LE header length | u64 LE body length | header JSON | body`."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_LENGTHS = struct.Struct("<IQ")
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 1 << 30


class FramingError(Exception):
    """The peer does not speak this protocol."""


def send(connection: socket.socket, header: Mapping[str, Any], body: bytes = b"") -> None:
    """Send one message. Raises OSError if the peer is gone."""
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    connection.sendall(_LENGTHS.pack(len(text), len(body)) + text)
    if body:
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receive one message.

    Raises:
        EOFError: the peer closed the connection, also in the middle of a message.
        FramingError: the lengths are out of bounds, or the header is not a JSON object.
    """
    header_length, body_length = _LENGTHS.unpack(_receive_exactly(connection, _LENGTHS.size))
    if header_length > MAX_HEADER_BYTES or body_length > MAX_BODY_BYTES:
        raise FramingError(f"message of {header_length} + {body_length} bytes is too long")
    text = _receive_exactly(connection, header_length)
    body = _receive_exactly(connection, body_length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise FramingError(f"header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FramingError("header is not a JSON object")
    return header, bytes(body)


def _receive_exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError("the peer closed the connection")
        view = view[count:]
    return data
