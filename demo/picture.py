"""Draws the two loss curves, with what was killed and how long recovery took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK, BROKEN, UNBROKEN, KILL = "#22272e", "#d9480f", "#1c7ed6", "#c92a2a"


@dataclass(frozen=True, slots=True)
class Kill:
    """One fault, where it fell in the run (in steps) and what its recovery cost."""

    step: int
    victim: str
    seconds: float
    replayed: int
    lost: int


def draw(broken: Sequence[float], unbroken: Sequence[float], kills: Sequence[Kill], path: Path) -> None:
    """Write a picture of mean loss per token over steps (PNG or SVG by the suffix of ``path``).

    The unbroken curve is drawn wide and pale under the broken one, so that equality is seen.
    """
    figure, axes = plt.subplots(figsize=(9.6, 4.2), dpi=150)
    steps = range(1, len(unbroken) + 1)
    axes.plot(steps, unbroken, color=UNBROKEN, alpha=0.35, linewidth=7, label="unbroken run", solid_capstyle="round")
    axes.plot(range(1, len(broken) + 1), broken, color=BROKEN, linewidth=1.6, label="engine and node killed")
    top = max([*broken, *unbroken])
    for kill in kills:
        axes.axvline(kill.step, color=KILL, linestyle=(0, (4, 3)), linewidth=1.2)
        text = f"{kill.victim} killed\nback in {kill.seconds:.1f} s\n{kill.replayed} replayed, {kill.lost} lost"
        axes.text(kill.step + 0.4, top, text, color=KILL, fontsize=8.5, verticalalignment="top")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss per token", color=INK)
    axes.set_title("The same training loop, with and without losing its machines", color=INK, loc="left", fontsize=11)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
