"""What a soak knows of itself, in one file, so that it can be stopped or killed at any time and gone on with."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Leg:
    """A stretch of kills on a cluster of its own, with its comparison at the end."""

    number: int
    kills: int
    in_operation: int
    steps: int
    seconds: float
    struck: dict[str, int]
    fault: str
    """Empty: nothing was lost, nothing done twice, all results and the adapter equal those of an unbroken run."""
    together: int = 0
    """Kills that took two victims in one moment."""


@dataclass
class State:
    """The whole soak."""

    seed: int
    kills: int
    legs: list[Leg] = field(default_factory=list)
    begun: int = 0
    """Legs that were begun; the last one may have been cut short, and then proves nothing."""
    cluster: str = ""
    """Root of the cluster that the last leg used, as long as it may be there."""

    @property
    def proven(self) -> int:
        """Kills of legs that ended well."""
        return sum(leg.kills for leg in self.legs if not leg.fault)

    @property
    def struck(self) -> Counter[str]:
        """How often each victim was killed in legs that ended well."""
        total: Counter[str] = Counter()
        for leg in self.legs:
            if not leg.fault:
                total.update(leg.struck)
        return total

    def next_leg(self, longest: int) -> int:
        """Kills of the next leg; 0 if all are done."""
        return min(longest, self.kills - self.proven)

    def save(self, directory: Path) -> None:
        """Write it so that a crash leaves the old or the new one."""
        new = directory / "state.json.new"
        with new.open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(directory / "state.json")

    @classmethod
    def load(cls, directory: Path) -> State:
        """Read it. Raises FileNotFoundError: no soak has its files there."""
        value: dict[str, Any] = json.loads((directory / "state.json").read_text())
        return cls(**{**value, "legs": [Leg(**leg) for leg in value["legs"]]})
