"""A harness that is told to end takes its cluster down first."""

from __future__ import annotations

import signal
from types import FrameType


def end_like_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt in this process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)


def _interrupted(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
