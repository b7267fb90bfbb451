"""The benches' own arithmetic: what counts as reached, what of a log counts, what a later run keeps."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.bench import report
from tests.bench.machine import look
from tests.bench.measure import Measure, of_samples, percentile
from tests.bench.picture import draw, share
from tests.bench.podlog import events
from tests.bench.recovery import comeback
from tests.bench.sampling import agreement


@pytest.mark.parametrize(
    ("value", "at_least", "met"),
    [(5.0, False, True), (5.01, False, False), (5.0, True, True), (4.99, True, False), (math.nan, False, False)],
)
def test_goals_point_either_way(value: float, at_least: bool, met: bool) -> None:
    """A figure at its goal reaches it, one beyond does not, and neither does what could not be measured."""
    assert Measure("w", value, "s", 5.0, at_least=at_least).met is met


def test_figures_without_goal_are_neither() -> None:
    """A figure that only explains another is not shown as reached or missed."""
    assert Measure("w", 1.0, "s").met is None


def test_medians_and_percentiles() -> None:
    """One slow sample of many moves no median; a percentile is a sample."""
    assert of_samples("w", [1.0, 100.0, 2.0], "s").value == 2.0
    samples = [float(number) for number in range(1, 101)]
    assert [percentile(samples, at) for at in (0.01, 0.95, 1.0)] == [1.0, 95.0, 100.0]


def test_samples_agree_token_by_token() -> None:
    """A completion counts as a whole, and none may be missing."""
    assert agreement([[1, 2], [3, 4], [5, 6], [7]], [[1, 2], [3, 5], [5, 6], [7]]) == 0.75
    with pytest.raises(ValueError, match="zip"):
        agreement([[1]], [])


def test_a_run_of_one_bench_keeps_the_others(tmp_path: Path) -> None:
    """What is written can be read again, and a table of it says what was missed and on which machine."""
    machine = look(tmp_path)
    missed = Measure("late", 3.0, "s", 2.0, samples=(2.5, 3.0))
    first = {"a": report.Report(machine, 0.5, (missed,))}
    path = tmp_path / "deep" / "bench.json"
    assert report.read(path) == {}
    report.write(path, first)
    report.write(path, report.read(path) | {"b": report.Report(machine, 0.5, (Measure("fast", 0.5, "ms"),))})
    found = report.read(path)
    assert found["a"] == first["a"]
    assert list(found) == ["a", "b"]
    table = report.table(found)
    assert "| a | late | 3.00 s | <= 2 s | **no** |" in table
    assert machine.date in table
    assert machine.cpu in table


def test_picture_is_drawn(tmp_path: Path) -> None:
    """Bars show the share of what a goal allows: beyond 1 is missed, whichever way the goal points."""
    fast = Measure("fast", 2000.0, "1/s", 1000.0, at_least=True)
    slow = Measure("slow", 3.0, "s", 2.0)
    assert (share(fast), share(slow)) == (0.5, 1.5)
    draw({"a": report.Report(look(tmp_path), 0.5, (fast, slow))}, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_comeback_is_taken_apart(tmp_path: Path) -> None:
    """Loading and replay are found in the logs of several processes; what came before the kill does not count."""
    stamp = "2030-01-01T00:00:"
    (tmp_path / "spare.log").write_text(
        f'{stamp}10Z stdout F {{"event": "base model org/m loaded in 4.5 s", "timestamp": "{stamp}10Z"}}\n'
        "a warning of a library\n"
    )
    (tmp_path / "server.log").write_text(
        f'{{"event": "model restored", "timestamp": "{stamp}01Z", "replayed": 7, "replay_seconds": 9.0}}\n'
        f'{{"event": "model restored", "timestamp": "{stamp}12Z", "replayed": 4, "replay_seconds": 1.5}}\n'
        f'{{"event": "recovered", "timestamp": "{stamp}13Z"}}\n'
        '{"event": "half a li'
    )
    began = datetime(2030, 1, 1, 0, 0, 2, tzinfo=UTC)
    found = events([tmp_path / "server.log", tmp_path / "spare.log"], began)
    assert [event.name.split()[0] for event in found] == ["base", "model", "recovered"]
    took = comeback(found, began, found[-1].time)
    assert (took.whole, took.loading, took.replay, took.replayed) == (11.0, 4.5, 1.5, 4)
