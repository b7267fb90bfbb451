"""Whether silence says something of the one who was asked, or of the one who asked."""

from __future__ import annotations

LATE_SHARE = 0.25
"""Share of a question's time in which the asking process may have had no CPU, so that silence still counts."""


def tells(took: float, late: float) -> bool:
    """Whether no answer within `took` seconds counts, where the process that asked was late by `late` of them.

    A process that is starved of CPU, throttled or stopped reads an answer that came in time when its own patience is
    over. A pod that is silent in truth is asked again when there is CPU; until then nothing can be said of it.
    """
    return late < LATE_SHARE * took
