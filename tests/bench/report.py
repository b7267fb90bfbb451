"""The figures of every bench that was run in this checkout: a JSON file that each run updates, and a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.machine import Machine
from tests.bench.measure import Measure


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one bench. `load_after` as `Machine.load`, at its end."""

    machine: Machine
    load_after: float
    measures: tuple[Measure, ...]


def read(path: Path) -> dict[str, Report]:
    """The reports by bench; none where there is no file yet."""
    if not path.exists():
        return {}
    benches: dict[str, Any] = json.loads(path.read_text())["benches"]
    return {name: _report(value) for name, value in benches.items()}


def write(path: Path, reports: Mapping[str, Report]) -> None:
    """Write them all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    benches = {name: _values(report) for name, report in reports.items()}
    path.write_text(json.dumps({"format": 1, "benches": benches}, indent=1) + "\n")


def table(reports: Mapping[str, Report]) -> str:
    """All figures as a Markdown table, with the machines they come from below it."""
    lines = ["| bench | what | measured | goal | reached |", "|---|---|---|---|---|"]
    for name, report in reports.items():
        for measure in report.measures:
            goal, reached = _goal(measure), {None: "", True: "yes", False: "**no**"}[measure.met]
            lines.append(f"| {name} | {measure.what} | {number(measure.value)} {measure.unit} | {goal} | {reached} |")
    lines.append("")
    for name, report in reports.items():
        machine = report.machine
        lines.append(
            f"* {name}: {machine.date}, {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux "
            f"{machine.kernel}, Python {machine.python}; load {machine.load:.1f} before and {report.load_after:.1f} "
            f"after; flushing a record of 300 bytes takes {machine.flush_ms} ms"
        )
    return "\n".join(lines)


def number(value: float) -> str:
    """Three significant digits, no exponent where a person needs none."""
    if not math.isfinite(value) or value == 0:
        return str(value)
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _goal(measure: Measure) -> str:
    if measure.goal is None:
        return ""
    return f"{'>=' if measure.at_least else '<='} {measure.goal:,g} {measure.unit}"


def _values(report: Report) -> dict[str, Any]:
    measures = [asdict(measure) | {"met": measure.met} for measure in report.measures]
    return {"machine": asdict(report.machine), "load_after": report.load_after, "measures": measures}


def _report(values: dict[str, Any]) -> Report:
    return Report(Machine(**values["machine"]), values["load_after"], _measures(values["measures"]))


def _measures(values: Sequence[dict[str, Any]]) -> tuple[Measure, ...]:
    return tuple(
        Measure(
            **{name: value for name, value in each.items() if name not in ("met", "samples")},
            samples=tuple(each["samples"]),
        )
        for each in values
    )
