"""Operations in which engines die: when one has to run alone, and when it fails. Pure.

Before an engine starts an operation its try is journaled. A try without a result before the next try of the same
operation is an engine's death. If the same incarnation made both, its server lived on and saw it. If a later one made
the next, the server ended with the engine: the operation may have taken the whole pod along, as lack of memory does,
or somebody killed it for reasons of his own. Such a death is half as telling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SEEN = 2
"""What a death counts that the engine's server saw; one that took the server along counts 1."""
SUSPECTED = 3 * SEEN
"""From here on an operation runs alone: in an engine of its own that holds no other model."""
CONDEMNED = 2 * SUSPECTED
"""From here on it fails."""

Verdict = Literal["innocent", "suspected", "condemned"]


@dataclass(frozen=True, slots=True)
class Tries:
    """What the journal says about the tries of one operation that has no result.

    Attributes:
        weight: of the deaths in it, the last try not counted.
        incarnation: who made the last try; 0 if there was none.
    """

    weight: int = 0
    incarnation: int = 0

    def tried(self, incarnation: int) -> Tries:
        """With one more try, by this incarnation."""
        return Tries(self.weight_seen_by(incarnation), incarnation)

    def weight_seen_by(self, incarnation: int) -> int:
        """What its deaths weigh, for an incarnation that is not trying it now."""
        if self.incarnation == 0:
            return 0
        return self.weight + (SEEN if self.incarnation == incarnation else 1)

    @property
    def passed_alone(self) -> bool:
        """Of an operation that has ended: whether engines died in it beside other models."""
        return self.weight >= SUSPECTED

    def verdict(self, incarnation: int) -> Verdict:
        """How that incarnation goes on with the operation."""
        weight = self.weight_seen_by(incarnation)
        if weight >= CONDEMNED:
            return "condemned"
        return "suspected" if weight >= SUSPECTED else "innocent"


UNTRIED = Tries()


def cause(kind: str, request: str) -> str:
    """What the client is told of an operation that failed for it."""
    return (
        f"{kind}: the training engine, or its whole pod, died each time it ran {request}, at last with nothing else in "
        "it; the operation was given up and changed nothing"
    )
