"""How long results are kept: until they were fetched, and then a day more. Pure.

Only time counts in which somebody could have asked again: monotonic time of this process, which starts anew after a
restart. So a result may be kept longer than a day, and never shorter.
"""

from __future__ import annotations

from collections.abc import Iterable

from everloop_trainer.session.numbers import Numbers
from everloop_trainer.session.records import Fetched
from everloop_trainer.session.streams import Stream

KEPT = 24 * 3600.0
"""Seconds for which a result is kept after it was fetched."""
COARSE = 60.0
"""Seconds within which fetches of one stream count as made together, at the last of them."""


class Retention:
    """Which results were fetched when, as far back as matters; `now` is always monotonic seconds.

    Args:
        streams: what was fetched in earlier incarnations counts as fetched now.
    """

    def __init__(self, streams: Iterable[Stream], now: float) -> None:
        self._batches = {stream.name: [(now, Numbers(stream.fetched.ranges()))] for stream in streams if stream.fetched}
        self._first: dict[str, float] = {}
        self._new: dict[str, Numbers] = {}

    def fetched(self, stream: str, seq: int, now: float) -> None:
        """A result is handed out for the first time."""
        batches = self._batches.setdefault(stream, [])
        if not batches or now - self._first.get(stream, now) > COARSE:
            batches.append((now, Numbers()))
            self._first[stream] = now
        batches[-1][1].add(seq)
        batches[-1] = (now, batches[-1][1])
        self._first.setdefault(stream, now)
        self._new.setdefault(stream, Numbers()).add(seq)

    def take_new(self) -> list[Fetched]:
        """What was fetched since this was last asked, for the journal."""
        new, self._new = self._new, {}
        return [Fetched(stream, numbers.ranges()) for stream, numbers in new.items()]

    def expired(self, now: float) -> dict[str, Numbers]:
        """By stream: the numbers whose results need not be kept any more."""
        expired: dict[str, Numbers] = {}
        for stream, batches in self._batches.items():
            for at, numbers in batches:
                if now - at >= KEPT:
                    expired.setdefault(stream, Numbers()).update(numbers)
        return expired

    def forget(self, stream: str, gone: Numbers) -> None:
        """Results that are kept no more."""
        batches = self._batches.get(stream, [])
        rest = [(at, left) for at, numbers in batches if (left := numbers.without(gone))]
        if rest:
            self._batches[stream] = rest
        else:
            self._batches.pop(stream, None)
