"""Draws every figure that has a goal, as a share of that goal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

from tests.bench.measure import Measure
from tests.bench.report import Report, number

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK, MET, MISSED = "#22272e", "#1c7ed6", "#c92a2a"


def share(measure: Measure) -> float:
    """How much of what the goal allows is used: up to 1 is reached, whichever way the goal points."""
    assert measure.goal is not None
    return measure.goal / measure.value if measure.at_least else measure.value / measure.goal


def draw(reports: Mapping[str, Report], path: Path) -> None:
    """Write the picture; without a figure that has a goal, none."""
    found = [
        (f"{name}: {measure.what}", measure)
        for name, report in reports.items()
        for measure in report.measures
        if measure.goal is not None and measure.value
    ]
    if not found:
        return
    figure, axes = plt.subplots(figsize=(10.0, 0.8 + 0.36 * len(found)), dpi=150)
    names = [name for name, _ in found]
    shares = [share(measure) for _, measure in found]
    bars = axes.barh(names, shares, color=[MET if measure.met else MISSED for _, measure in found], height=0.6)
    axes.bar_label(bars, [f" {number(measure.value)} {measure.unit}" for _, measure in found], fontsize=8, color=INK)
    axes.axvline(1.0, color=INK, linewidth=1.2)
    axes.set_xlabel("share of what the goal allows (right of the line: missed)", color=INK)
    axes.set_xlim(0, max(1.3, 1.2 * max(shares)))
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
