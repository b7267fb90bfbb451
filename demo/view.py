"""The live view: both curves as they grow, and what happens to the machines."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

HEIGHT = 9
RED, ORANGE, BLUE, GREEN, DIM, RESET = "\x1b[31m", "\x1b[33m", "\x1b[34m", "\x1b[32m", "\x1b[2m", "\x1b[0m"


def chart(curves: Sequence[tuple[str, Sequence[float]]], kills: Sequence[int], steps: int, width: int) -> list[str]:
    """Rows of a text chart of loss over steps; each curve is (mark, values), later ones on top.

    Columns hold one or more steps; a step at which something was killed is a column of ``|``.
    """
    values = [v for _, curve in curves for v in curve]
    if not values:
        return [""] * HEIGHT
    low, high = min(values), max(values)
    columns = min(steps, width)
    rows = [[" "] * columns for _ in range(HEIGHT)]

    def column(step: int) -> int:
        return min(columns - 1, step * columns // steps)

    for step in kills:
        for row in rows:
            row[column(step)] = "|"
    for mark, curve in curves:
        for step, value in enumerate(curve):
            depth = 0.0 if high == low else (high - value) / (high - low)
            rows[round(depth * (HEIGHT - 1))][column(step)] = mark
    labels = {0: f"{high:5.2f} ", HEIGHT - 1: f"{low:5.2f} "}
    return [labels.get(i, " " * 6) + "".join(row).rstrip() for i, row in enumerate(rows)]


@dataclass
class View:
    """Prints events as they come; on a terminal it also keeps a chart below them up to date."""

    steps: int
    out: TextIO = field(default_factory=lambda: sys.stdout)
    started: float = field(default_factory=time.monotonic)
    unbroken: list[float] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)
    kills: list[int] = field(default_factory=list)
    title: str = ""
    _drawn: int = 0

    def say(self, text: str, colour: str = "") -> None:
        """One event line, stamped with seconds since the start."""
        self._erase()
        stamp = f"{time.monotonic() - self.started:6.1f} s  "
        tail = RESET if colour and self.out.isatty() else ""
        head = colour if self.out.isatty() else ""
        print(stamp + head + text + tail, file=self.out, flush=True)
        self._draw()

    def step(self, curve: list[float], loss: float) -> None:
        """A step of ``curve`` (``broken`` or ``unbroken``) is done with this loss per token."""
        curve.append(loss)
        if self.out.isatty():
            self._erase()
            self._draw()
        else:
            elapsed = time.monotonic() - self.started
            print(f"{elapsed:6.1f} s  step {len(curve)}/{self.steps} loss {loss:.4f}", file=self.out, flush=True)

    def close(self) -> None:
        """Leave the last chart on the screen and stop redrawing it."""
        self._drawn = 0
        self.title = ""

    def _erase(self) -> None:
        if self._drawn:
            self.out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _draw(self) -> None:
        if not self.out.isatty() or not self.title:
            return
        width = max(20, shutil.get_terminal_size().columns - 8)
        lines = [f"{DIM}{self.title}{RESET}"]
        curves = [("o", self.unbroken), ("*", self.broken)]
        lines += chart(curves, self.kills, self.steps, width)
        done = self.broken if len(self.broken) < self.steps else self.unbroken
        if done:
            counts = f"* killed {len(self.broken)}/{self.steps}   o unbroken {len(self.unbroken)}/{self.steps}"
            lines.append(f"{DIM}      {counts}   last loss {done[-1]:.4f}{RESET}")
        print("\n".join(lines), file=self.out, flush=True)
        self._drawn = len(lines)
