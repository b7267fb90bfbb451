"""Numbers that never arrive: how long later ones of their model wait for them. Pure.

Only time counts in which the missing number could have arrived: monotonic time of this process, which starts anew
after a restart, and only while some client was heard, because without a gateway none is.
"""

from __future__ import annotations

from collections.abc import Iterable

from everloop_trainer.session.streams import Stream

MINUTES = 6
QUIET = 60.0
"""Seconds without any call after which clients are taken to be cut off; each that waits polls more often."""
AT_ONCE = 1000
"""Numbers of one gap that are given up together; a wider gap, which no client makes, takes as long again."""


def explanation(seq: int) -> str:
    """What the client is told of a number that was given up, should it come after all."""
    return (
        f"seq_id: operation {seq} did not arrive within {MINUTES} minutes while later ones of its model waited; "
        "it was given up and will not run"
    )


class Gaps:
    """Since when each ordered stream waits for the number that is its turn."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}

    def lost(self, streams: Iterable[Stream], now: float, heard: float) -> list[tuple[str, range]]:
        """The numbers that are given up now; to be asked every second or so.

        Args:
            streams: all streams.
            now: monotonic seconds.
            heard: when the last call of any client came, on the same clock.
        """
        since = {} if now - heard > QUIET else self._since
        self._since, lost = {}, []
        for stream in streams:
            missing = stream.missing()
            if missing is None:
                continue
            number, start = since.get(stream.name, (missing, now))
            if number != missing:
                start = now
            if now - start >= MINUTES * 60:
                # Those behind it have been missing as long: the last that waits was there from the start.
                lost.append((stream.name, range(missing, min(min(stream.pending), missing + AT_ONCE))))
            else:
                self._since[stream.name] = missing, start
        return lost

    def forget(self) -> None:
        """Start anew: nothing could be accepted until now."""
        self._since.clear()
