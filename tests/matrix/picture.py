"""Draws the matrix: victims by moments, with the seconds after which the loop went on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm

INK = "#22272e"
FASTEST, SLOWEST = 0.3, 100.0  # seconds, the ends of the colour scale


def draw(victims: Sequence[str], moments: Sequence[str], seconds: Mapping[tuple[str, str], float], path: Path) -> None:
    """Write the table as a picture; a cell that is not in `seconds` stays empty."""
    figure, axes = plt.subplots(figsize=(2.6 + 0.95 * len(moments), 1.9 + 0.36 * len(victims)), dpi=150)
    table = [[seconds.get((victim, moment), float("nan")) for moment in moments] for victim in victims]
    axes.imshow(table, aspect="auto", cmap="YlOrRd", norm=LogNorm(FASTEST, SLOWEST), alpha=0.75)
    for row, victim in enumerate(victims):
        for column, moment in enumerate(moments):
            text = f"{seconds[victim, moment]:.1f}" if (victim, moment) in seconds else "-"
            axes.text(column, row, text, ha="center", va="center", color=INK, fontsize=9)
    words = [moment.replace("_", " ") for moment in moments]
    axes.set_xticks(range(len(moments)), words, rotation=30, ha="right", color=INK)
    axes.set_yticks(range(len(victims)), victims, color=INK)
    axes.set_title("Seconds until the loop was told what it waited for", color=INK, loc="left", fontsize=11)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
