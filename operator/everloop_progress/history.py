"""The iterations of a job, each counted once, and what can be said of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from .entries import Entry

REMEMBERED = 50_000
"""Entries that are kept in full; of older ones only the numbers count."""


@dataclass(frozen=True, slots=True)
class Point:
    """A checkpoint and the iteration after which it was saved; iteration 0 is the beginning."""

    iteration: int
    checkpoint: str


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked about a metric."""

    metric: str
    value: float
    at_least: bool
    consecutive: int

    def met(self, value: float) -> bool:
        """Whether a value is good enough."""
        return value >= self.value if self.at_least else value <= self.value


class Sequence:
    """Entries in the order of their iterations.

    One that comes again, or an earlier one, is a new start from there: it takes the place of all that followed.
    """

    def __init__(self) -> None:
        self._numbers = array("q")
        self._entries: deque[Entry] = deque(maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, entry: Entry) -> None:
        """The next line."""
        if self._numbers and entry.iteration <= self._numbers[-1]:
            self._cut(bisect_left(self._numbers, entry.iteration))
        self._numbers.append(entry.iteration)
        self._entries.append(entry)

    def cut_after(self, iteration: int) -> None:
        """What came after this iteration counts no more."""
        self._cut(bisect_right(self._numbers, iteration))

    def _cut(self, length: int) -> None:
        for _ in range(min(len(self._numbers) - length, len(self._entries))):
            self._entries.pop()
        del self._numbers[length:]

    @property
    def last(self) -> Entry | None:
        """The newest entry."""
        return self._entries[-1] if self._entries else None

    def newest_first(self) -> Iterable[Entry]:
        """The entries that are remembered."""
        return reversed(self._entries)

    def values(self, metric: str) -> list[tuple[int, float]]:
        """(iteration, value) of each entry that has this metric, oldest first."""
        return [(e.iteration, e.metrics[metric]) for e in self._entries if metric in e.metrics]

    def tail(self, count: int) -> list[Entry]:
        """The newest entries, oldest first."""
        return list(islice(self._entries, max(0, len(self._entries) - count), None))


class History:
    """All that a job has reported."""

    def __init__(self) -> None:
        self.iterations = Sequence()
        self.evaluations = Sequence()

    def cut_after(self, iteration: int) -> None:
        """The job goes on after this iteration: what came later counts no more."""
        self.iterations.cut_after(iteration)
        self.evaluations.cut_after(iteration)

    def resume_point(self, start: str) -> Point:
        """The newest checkpoint; `start` is what the job started from."""
        saved = (entry for entry in self.iterations.newest_first() if entry.checkpoint)
        return next((Point(entry.iteration, entry.checkpoint) for entry in saved), Point(0, start))

    def values(self, metric: str) -> list[tuple[int, float]]:
        """(iteration, value), oldest first; a metric of evaluations begins with `eval/`."""
        if metric.startswith("eval/"):
            return self.evaluations.values(metric.removeprefix("eval/"))
        return self.iterations.values(metric)

    def reached(self, goal: Goal) -> int | None:
        """The iteration in which the goal was reached for the first time; those without the metric are passed over."""
        streak = 0
        for iteration, value in self.values(goal.metric):
            streak = streak + 1 if goal.met(value) else 0
            if streak >= goal.consecutive:
                return iteration
        return None

    def best(self, goal: Goal) -> tuple[Point, float] | None:
        """The best iteration by the goal's metric among those with a checkpoint; of equals the first."""
        values = dict(self.values(goal.metric))
        found: tuple[Point, float] | None = None
        for entry in reversed(list(self.iterations.newest_first())):
            value = values.get(entry.iteration)
            if not entry.checkpoint or value is None:
                continue
            if found is None or (value > found[1] if goal.at_least else value < found[1]):
                found = (Point(entry.iteration, entry.checkpoint), value)
        return found
