"""Operations in which engines die: when one has to run alone, and when it fails. Pure.

Before an engine starts an operation its try is journaled. A try without a result before the next try of the same
operation is an engine's death if the same incarnation made both: its server lived on, so it was the engine that died.
A try that a later incarnation follows counts for nothing, because there the server died, or its pod, or its node: a
loop may be killed from outside as often as it likes without any operation failing for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SUSPECTED = 3
"""Engine deaths after which an operation runs alone: in an engine of its own that holds no other model."""
CONDEMNED = 2 * SUSPECTED
"""Engine deaths after which it fails."""

Verdict = Literal["innocent", "suspected", "condemned"]


@dataclass(frozen=True, slots=True)
class Tries:
    """What the journal says about the tries of one operation that has no result.

    Attributes:
        deaths: how many engines have died in it, the last try not counted.
        incarnation: who made the last try; 0 if there was none.
    """

    deaths: int = 0
    incarnation: int = 0

    def tried(self, incarnation: int) -> Tries:
        """With one more try, by this incarnation."""
        return Tries(self.deaths_seen_by(incarnation), incarnation)

    def deaths_seen_by(self, incarnation: int) -> int:
        """How many engines have died in it, for an incarnation that is not trying it now."""
        return self.deaths + (self.incarnation == incarnation)

    @property
    def passed_alone(self) -> bool:
        """Of an operation that has ended: whether engines died in it beside other models."""
        return self.deaths >= SUSPECTED

    def verdict(self, incarnation: int) -> Verdict:
        """How that incarnation goes on with the operation."""
        deaths = self.deaths_seen_by(incarnation)
        if deaths >= CONDEMNED:
            return "condemned"
        return "suspected" if deaths >= SUSPECTED else "innocent"


UNTRIED = Tries()


def cause(kind: str, request: str) -> str:
    """What the client is told of an operation that failed for it."""
    return (
        f"{kind}: the training engine died {CONDEMNED} times while it ran {request}, the last {CONDEMNED - SUSPECTED} "
        "times with nothing else in it; the operation was given up and changed nothing"
    )
