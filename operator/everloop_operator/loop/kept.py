"""How an object of ours is kept: as read, but packed, because thousands of parsed objects would fill the memory."""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import dataclass
from typing import Any

from everloop_operator.api import names

from .ports import Body

LEVEL = 1
"""Of zlib: it packs to a third, and a higher one takes longer than it saves."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What is asked of all objects at once."""

    phase: str
    stalled: str
    """Reason of the condition Stalled while that is True, else empty."""
    node: str
    """The node that the status names."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A TrainingSession or an RLJob."""

    uid: str
    version: int
    """The resourceVersion, which is ordered."""
    summary: Summary
    packed: bytes

    def body(self) -> dict[str, Any]:
        """As read, without managedFields."""
        body: dict[str, Any] = json.loads(zlib.decompress(self.packed))
        return body


def keep(body: Body) -> Kept:
    """Packs an object as read."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    text = json.dumps({**body, "metadata": metadata}, separators=(",", ":"))
    packed = zlib.compress(text.encode(), LEVEL)
    return Kept(metadata["uid"], int(metadata["resourceVersion"]), summary_of(body.get("status") or {}), packed)


def summary_of(status: Body) -> Summary:
    """Of an object with this status."""
    stalled = next(
        (
            item["reason"]
            for item in status.get("conditions") or ()
            if item["type"] == names.CONDITION_STALLED and item["status"] == "True"
        ),
        "",
    )
    return Summary(sys.intern(status.get("phase", "")), stalled, (status.get("pod") or {}).get("node") or "")
