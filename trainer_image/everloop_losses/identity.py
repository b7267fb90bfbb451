"""A traced loss is its id: the text that a client gets for a loss holds the loss itself.

So nothing has to be kept, and nothing can be lost: an operation that names a loss carries it, into the journal and
through every repetition. The id also names the client session that made it; the models of another can't use it.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from typing import Any

from everloop_losses.graph import GraphError, TracedLoss, read

MARK = ":loss:"
"""Between the session and the packed loss."""
MAX_JSON_BYTES = 256 * 1024
MAX_ID_CHARACTERS = 32 * 1024
"""Each operation that uses the loss carries as much."""


def loss_id(session_id: str, request: Mapping[str, Any]) -> str:
    """Pack the loss of a `create_custom_loss` request, which is checked.

    Raises:
        GraphError: names the field that is wrong, or says that the loss is too large.
    """
    read(request.get("name"), request.get("inputs"), request.get("graph"))
    content = {key: request[key] for key in ("name", "inputs", "graph")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    if len(text) > MAX_JSON_BYTES:
        raise GraphError(f"graph: {len(text)} bytes of JSON are more than {MAX_JSON_BYTES}")
    packed = base64.urlsafe_b64encode(zlib.compress(text, 9)).decode().rstrip("=")
    found = f"{session_id}{MARK}{packed}"
    if len(found) > MAX_ID_CHARACTERS:
        raise GraphError(f"graph: packed, {len(found)} characters are more than {MAX_ID_CHARACTERS}")
    return found


def session_of(text: str) -> str | None:
    """The client session that made the loss; None if the text is no loss's id."""
    session, mark, _ = text.partition(MARK)
    return session if mark and len(text) <= MAX_ID_CHARACTERS else None


def unpack(text: str) -> TracedLoss:
    """The loss that an id holds.

    Raises:
        GraphError: it holds none.
    """
    packed = text.partition(MARK)[2].encode()
    try:
        inflating = zlib.decompressobj()
        content = inflating.decompress(
            base64.b64decode(packed + b"=" * (-len(packed) % 4), b"-_", True), MAX_JSON_BYTES
        )
        if not inflating.eof or len(text) > MAX_ID_CHARACTERS:
            raise GraphError("it was not made by create_custom_loss")
        value = json.loads(content)
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        raise GraphError("it was not made by create_custom_loss") from None
    if not isinstance(value, dict):
        raise GraphError("it was not made by create_custom_loss")
    return read(value.get("name"), value.get("inputs"), value.get("graph"))
