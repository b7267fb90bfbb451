"""What a user sent along with a model or a checkpoint, as it is kept in a base. Pure."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator


def _to_text(metadata: dict[str, Any] | None) -> str | None:
    return None if metadata is None else json.dumps(metadata, separators=(",", ":"))


def _from_text(text: str | None) -> dict[str, Any] | None:
    found: dict[str, Any] | None = None if text is None else json.loads(text)
    return found


Metadata = Annotated[
    dict[str, Any] | None, PlainSerializer(_to_text, return_type=str | None), PlainValidator(_from_text)
]
"""JSON text in a string: only so are NaN and any depth of nesting that was accepted read back as they were."""
