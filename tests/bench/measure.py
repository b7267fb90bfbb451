"""What a bench measured, and whether that reaches its goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure.

    Attributes:
        what: what was measured, as a line of the table.
        value: in `unit`.
        goal: the value that is wanted; None where the figure only explains another.
        at_least: the goal is a lower bound, else an upper one.
        samples: the single values behind `value`, in the order in which they were taken.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False
    samples: tuple[float, ...] = ()

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one. What could not be measured reaches none."""
        if self.goal is None:
            return None
        if not math.isfinite(self.value):
            return False
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def of_samples(what: str, samples: Sequence[float], unit: str, goal: float | None = None) -> Measure:
    """The median of several values, with an upper bound as goal."""
    return Measure(what, median(samples), unit, goal, samples=tuple(samples))


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all (0 to 1) do not exceed."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]
