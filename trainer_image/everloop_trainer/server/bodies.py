"""Reading request bodies: size limits, `Content-Encoding: zstd`, JSON. What can't be decoded is a 400 that says why."""

from __future__ import annotations

from typing import Any

import zstandard
from starlette.exceptions import HTTPException
from starlette.requests import Request

from everloop_http import json_bodies

MAX_JSON_BYTES = 16 << 20
MAX_PROTOBUF_BYTES = 64 << 20
PROTOBUF = "application/x-protobuf"


async def read_json_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        HTTPException: 400 (not a JSON object, or a field is given twice), 413 (too large).
    """
    return json_object(await _read_limited(request, MAX_JSON_BYTES))


def json_object(body: bytes) -> dict[str, Any]:
    """The same of bytes."""
    try:
        value = json_bodies.parse(body)
    except json_bodies.UnreadableJson as error:
        raise HTTPException(400, str(error)) from None
    if not isinstance(value, dict):
        raise HTTPException(400, "body: must be a JSON object")
    return value


async def read_protobuf(request: Request) -> bytes:
    """The body's bytes, decompressed.

    Raises:
        HTTPException: 400 (not zstd), 413 (too large, also once decompressed), 415 (wrong type or encoding).
    """
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != PROTOBUF:
        raise HTTPException(415, f"Content-Type: must be {PROTOBUF}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    body = await _read_limited(request, MAX_PROTOBUF_BYTES)
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise HTTPException(415, "Content-Encoding: must be zstd or absent")
    return _decompress(body)


def _decompress(body: bytes) -> bytes:
    """Only a whole frame, which says how long its content is: the start of one may be a message, too."""
    try:
        length = zstandard.frame_content_size(body)
        if length > MAX_PROTOBUF_BYTES:
            raise HTTPException(413, f"body: larger than {MAX_PROTOBUF_BYTES} bytes once decompressed")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_PROTOBUF_BYTES)
        return decompressor.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise HTTPException(400, f"body: not zstd: {error}") from None


async def _read_limited(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise HTTPException(413, f"body: larger than {limit} bytes")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise HTTPException(413, f"body: larger than {limit} bytes")
    return bytes(body)
