"""Framing of the engine's socket: u32 LE header length, u64 LE body length, header (JSON), body."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

Header = dict[str, Any]

_LENGTHS = struct.Struct("<IQ")
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 1 << 30


class FrameError(Exception):
    """The peer sent something that is no frame, or was to be sent something that is none."""


def encode(header: Header, body: bytes = b"") -> bytes:
    """One frame. Raises FrameError if it is longer than the peer would take."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise FrameError(f"frame of {len(text)} + {len(body)} bytes")
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


async def read(stream: asyncio.StreamReader) -> tuple[Header, bytes]:
    """Reads one frame.

    Raises:
        asyncio.IncompleteReadError: end of file, also in the middle of a frame.
        FrameError: lengths out of bounds, or the header is no JSON object.
    """
    header_length, body_length = _LENGTHS.unpack(await stream.readexactly(_LENGTHS.size))
    if header_length > MAX_HEADER_BYTES or body_length > MAX_BODY_BYTES:
        raise FrameError(f"frame of {header_length} + {body_length} bytes")
    text = await stream.readexactly(header_length)
    body = await stream.readexactly(body_length) if body_length else b""
    try:
        header = json.loads(text)
    except ValueError as error:
        raise FrameError(f"header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FrameError("header is not a JSON object")
    return header, body
