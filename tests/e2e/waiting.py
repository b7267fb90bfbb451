"""Waiting for a fact about the cluster, with a deadline and the last thing seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(fact: Callable[[], T | None], what: str, seconds: float = 60.0, pause: float = 0.1) -> T:
    """The first value of ``fact`` that is neither None nor False; it is asked every ``pause`` seconds.

    Raises:
        TimeoutError: none came within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = fact()
        if value is not None and value is not False:
            return value
        time.sleep(pause)
    raise TimeoutError(f"{what}: not within {seconds:.0f} s")
