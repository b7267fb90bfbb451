"""What a status says of interruptions that the status before it did not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Interruption:
    """One entry of `status.recoveries`."""

    reason: str
    rule: str = ""
    """The rule by which a node was left; empty for other reasons."""
    seconds: float = 0.0
    """How long it lasted, once it is over."""
    replayed: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Those that are new, and those whose figures are."""

    begun: tuple[Interruption, ...] = ()
    ended: tuple[Interruption, ...] = ()


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Interruptions:
    """Compares two statuses, as they are written, of a TrainingSession or an RLJob."""
    known = {entry["id"]: entry for entry in before.get("recoveries") or ()}
    entries = after.get("recoveries") or ()
    begun = [entry for entry in entries if entry["id"] not in known]
    ended = [
        entry
        for entry in entries
        if entry.get("seconds") is not None and known.get(entry["id"], {}).get("seconds") is None
    ]
    return Interruptions(tuple(map(_interruption, begun)), tuple(map(_interruption, ended)))


def _interruption(entry: Mapping[str, Any]) -> Interruption:
    return Interruption(
        reason=entry["reason"],
        rule=entry.get("rule") or "",
        seconds=float(entry.get("seconds") or 0.0),
        replayed=entry.get("replayedOperations") or 0,
        lost=entry.get("lostOperations") or 0,
    )
