"""A judgement on one side of a session's state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aspect:
    """A condition without its times: `status` is True, False, or None for unknown."""

    status: bool | None
    reason: str
    message: str = ""
