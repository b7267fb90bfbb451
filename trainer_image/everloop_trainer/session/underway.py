"""Work on the storage that has begun and has not ended: told of once it takes long, because it may never end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLOW = 30.0
"""Seconds after which a state's file is late; a large adapter takes some on a busy file system."""


class Underway:
    """What is being written, and since when. `monotonic` is a clock in seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since: dict[object, tuple[str, float]] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Around the work; `what` is for people."""
        key = object()
        self._since[key] = what, self._monotonic()
        try:
            yield
        finally:
            del self._since[key]

    @property
    def trouble(self) -> str:
        """What takes longest, if that is too long; empty otherwise."""
        for what, since in self._since.values():  # the oldest comes first
            if (seconds := self._monotonic() - since) > SLOW:
                return f"{what} has been under way for {seconds:.0f} s"
        return ""
