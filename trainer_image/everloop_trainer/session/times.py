"""Wall-clock times as RFC 3339 texts: what checkpoints are given, and what they expire by. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

SHORTEST_TTL = 3600
LONGEST_TTL = 10 * 365 * 86400
"""Seconds for which a checkpoint may be told to be kept; the bounds of the wire."""


def refuse_ttl(seconds: int | None) -> str | None:
    """Why a checkpoint can't be kept for so long, or None; None is for ever."""
    if seconds is None or SHORTEST_TTL <= seconds <= LONGEST_TTL:
        return None
    return f"ttl_seconds: must be between {SHORTEST_TTL} (1 hour) and {LONGEST_TTL} (10 years), got {seconds}"


def after(time: str, seconds: int) -> str:
    """The time so many seconds later."""
    text = (instant(time) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def instant(time: str) -> datetime:
    """A time that can be compared."""
    return datetime.fromisoformat(time).astimezone(UTC)
