"""What this server has had computed since it started: for the platform's figures, not for any decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Work:
    """Counts operations that ended, and seconds of the engine."""

    ended: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By kind, and whether it succeeded."""
    useful_seconds: float = 0.0
    """In operations that were computed for the first time and succeeded; waits for space are not among them."""
    replay_seconds: float = 0.0
    """In bringing models back into an engine."""

    def end(self, kind: str, *, ok: bool, seconds: float) -> None:
        """An operation has a result, for which the engine took so many seconds."""
        self.ended[kind, ok] += 1
        if ok:
            self.useful_seconds += seconds

    def to_json(self) -> dict[str, Any]:
        """Its part of the body of `GET /status`."""
        return {
            "operations": [
                {"kind": kind, "outcome": "succeeded" if ok else "failed", "count": count}
                for (kind, ok), count in sorted(self.ended.items())
            ],
            "usefulSeconds": f"{self.useful_seconds:.3f}",
            "replaySeconds": f"{self.replay_seconds:.3f}",
        }
