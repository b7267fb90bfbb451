"""A pod that the API server does not have: when it is tried again, and when that is for a person to mend."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

FORBIDDEN_SECONDS = 20.0
"""What is forbidden (403) for less than this may be so because an API server or a controller has just started: a new
namespace has no service account yet, or an admission plugin has not read its objects."""
SOON_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
"""Between two tries of what is for a person to mend (a quota may have been raised)."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server's refusal to create the pod of the next attempt.

    Attributes:
        message: in its words.
        time: when it was told last.
        generation: of the object whose pod it was.
        transient: whether the same request may succeed a moment later: it failed rather than that it was refused.
        forbidden_since: when admission or authorization refused it first, in a row; None if validation did.
    """

    message: str
    time: datetime
    generation: int
    transient: bool = False
    forbidden_since: datetime | None = None

    @property
    def settled(self) -> bool:
        """Whether it is for a person to mend."""
        if self.forbidden_since is None:
            return not self.transient
        return self.time - self.forbidden_since >= timedelta(seconds=FORBIDDEN_SECONDS)

    @property
    def patience_seconds(self) -> float:
        """How long after it the next try is made."""
        return PATIENCE_SECONDS if self.settled else SOON_SECONDS


def refused(before: Refusal | None, message: str, now: datetime, generation: int, *, forbidden: bool) -> Refusal:
    """The refusal that was just told, after the one before."""
    since = None
    if forbidden:
        again = before if before and before.generation == generation else None
        since = again.forbidden_since if again and again.forbidden_since else now
    return Refusal(message[:900], now, generation, forbidden_since=since)
