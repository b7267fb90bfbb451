"""How long an iteration takes."""

from __future__ import annotations

from collections import deque

REMEMBERED = 33


class Pace:
    """Seconds for an iteration, from when the iterations were first seen: the driver's own clock is not asked."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    def note(self, iteration: int, clock: float) -> None:
        """This iteration is the last one now; `clock` is monotonic, in seconds."""
        if self._seen and iteration == self._seen[-1][0]:
            return
        if self._seen and iteration < self._seen[-1][0]:
            self._seen.clear()
        self._seen.append((iteration, clock))

    def seconds(self) -> float | None:
        """None while too little was seen."""
        if len(self._seen) < 2:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return (ended - began) / (last - first)
