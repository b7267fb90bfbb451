"""Sets of operation numbers, held as ranges: what a client sends in order takes the space of one range. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Range = tuple[int, int]
"""First number, and the number behind the last."""


class Numbers:
    """A set of numbers that only grows by itself; `ranges` must be ascending and disjoint."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def add(self, start: int, end: int | None = None) -> None:
        """Take in one number or, with `end`, those from `start` up to but not including it."""
        end = start + 1 if end is None else end
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def update(self, other: Numbers) -> None:
        """Take in every number of another set."""
        for start, end in other.ranges():
            self.add(start, end)

    def without(self, other: Numbers) -> Numbers:
        """The numbers that the other set does not hold."""
        rest = Numbers()
        for start, end in self.ranges():
            for index in range(bisect_right(other._ends, start), bisect_left(other._starts, end)):
                if start < other._starts[index]:
                    rest.add(start, other._starts[index])
                start = other._ends[index]
            if start < end:
                rest.add(start, end)
        return rest

    def ranges(self) -> tuple[Range, ...]:
        """The set as ascending ranges that do not touch."""
        return tuple(zip(self._starts, self._ends, strict=True))

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._ends[index]

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.ranges() == other.ranges()

    def __hash__(self) -> int:
        raise TypeError("numbers can change")

    def __repr__(self) -> str:
        return f"Numbers({self.ranges()})"
