"""What this server has had computed since it started: for the platform's figures, not for any decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from everloop_trainer.session.usage import Usage

PARTS = ("wait", "forward", "backward", "optimizer", "journal")
"""Where the time of operations of models goes. Wait: it was their turn, and the engine had others to see to."""
BASE, UNKNOWN, OTHER = "base", "unknown", "other"
"""Instead of a model's id: the base model itself; of a key's: not heard yet; of both: all that there is no room for."""
MOST_PAIRS = 64
"""Models with their keys whose tokens are counted apart. Whoever comes after so many counts as `other`."""


@dataclass(slots=True)
class Work:
    """Counts operations that ended, tokens, and seconds."""

    ended: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By kind, and whether it succeeded."""
    useful_seconds: float = 0.0
    """In operations that were computed for the first time and succeeded; waits for space are not among them."""
    replay_seconds: float = 0.0
    """In bringing models back into an engine."""
    step_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """By part."""
    tokens: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    """By model and key, and then by kind."""

    def end(self, kind: str, *, ok: bool, seconds: float) -> None:
        """An operation has a result, for which the engine took so many seconds."""
        self.ended[kind, ok] += 1
        if ok:
            self.useful_seconds += seconds

    def spend(self, part: str, seconds: float) -> None:
        """So many seconds of a step went into this part."""
        self.step_seconds[part] += seconds

    def use(self, model: str, key: str, usage: Usage) -> None:
        """Something was computed for the first time, of this model and with this key."""
        for part, seconds in (
            ("forward", usage.forward),
            ("backward", usage.backward),
            ("optimizer", usage.optimizer),
        ):
            self.spend(part, seconds)
        counted = Counter(trained=usage.trained, scored=usage.scored, prompt=usage.prompt, sampled=usage.sampled)
        pair = model, key
        if +counted:
            if pair not in self.tokens and len(self.tokens) >= MOST_PAIRS:
                pair = OTHER, OTHER
            self.tokens.setdefault(pair, Counter()).update(counted)

    def to_json(self) -> dict[str, Any]:
        """Its part of the body of `GET /status`."""
        return {
            "operations": [
                {"kind": kind, "outcome": "succeeded" if ok else "failed", "count": count}
                for (kind, ok), count in sorted(self.ended.items())
            ],
            "usefulSeconds": f"{self.useful_seconds:.3f}",
            "replaySeconds": f"{self.replay_seconds:.3f}",
            "stepSeconds": {part: f"{self.step_seconds[part]:.3f}" for part in PARTS},
            "tokens": [
                {"model": model, "key": key, "kind": kind, "count": count}
                for (model, key), counted in sorted(self.tokens.items())
                for kind, count in sorted(counted.items())
                if count
            ],
        }
