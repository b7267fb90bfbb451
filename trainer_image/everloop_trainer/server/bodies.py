"""Reading request bodies: size limits, `Content-Encoding: zstd`, JSON. What can't be decoded is a 400 that says why."""

from __future__ import annotations

import json
from typing import Any

import zstandard
from starlette.exceptions import HTTPException
from starlette.requests import Request

MAX_JSON_BYTES = 16 << 20
MAX_PROTOBUF_BYTES = 64 << 20
PROTOBUF = "application/x-protobuf"


async def read_json_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        HTTPException: 400 (not a JSON object), 413 (too large).
    """
    body = await _read_limited(request, MAX_JSON_BYTES)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"body: not JSON: {error}") from None
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
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_PROTOBUF_BYTES).stream_reader(body)
    try:
        content = reader.read(MAX_PROTOBUF_BYTES + 1)
    except zstandard.ZstdError as error:
        raise HTTPException(400, f"body: not zstd: {error}") from None
    if len(content) > MAX_PROTOBUF_BYTES:
        raise HTTPException(413, f"body: larger than {MAX_PROTOBUF_BYTES} bytes once decompressed")
    return content


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
