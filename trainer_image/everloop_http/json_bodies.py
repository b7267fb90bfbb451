"""JSON bodies of clients, strictly: what the gateway authorizes must be what the session pod reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

MOST_VALUES = 2**18
"""Brackets, braces and quotes in a JSON body: two bytes of them may become an object of sixty. Numbers take less."""
MOST_OF_A_SESSION = 10**18
"""Models of one session of a client, and sampling sessions: as many as their ids have room for."""
LARGEST = 2**63 - 1
"""Of the numbers of operations, and of whatever else has 64 bits with a sign."""
_LONGEST_NAME = 100
"""Characters of a field's name that an error message repeats."""


class UnreadableJson(ValueError):
    """A body can't be read; the message is for the client."""


def parse(body: bytes) -> Any:
    """What a body says.

    Raises UnreadableJson: it is no JSON, a field is given twice, or there is more in it than is decoded.
    """
    if sum(map(body.count, (b"[", b"{", b'"'))) > MOST_VALUES:
        raise UnreadableJson(f"body: more than {MOST_VALUES} brackets, braces and quotes")
    try:
        return json.loads(body, object_pairs_hook=_object)
    except UnreadableJson:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableJson(f"body: not JSON: {error}") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two values they take."""
    value: dict[str, Any] = {}
    for name, content in pairs:
        if name in value:
            raise UnreadableJson(f"{name[:_LONGEST_NAME]!r}: given more than once")
        value[name] = content
    return value
