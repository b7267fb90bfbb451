"""Every iteration is counted once, whatever a driver reports."""

from __future__ import annotations

import pytest

from everloop_progress import history as module
from everloop_progress.entries import Entry
from everloop_progress.history import Goal, History, Point, Sequence
from everloop_progress.pace import Pace


def filled(*numbers: int) -> Sequence:
    sequence = Sequence()
    for order, number in enumerate(numbers):
        sequence.add(Entry(number, {"order": float(order)}))
    return sequence


@pytest.mark.parametrize(
    ("reported", "counted"),
    [
        ((), []),
        ((1, 2, 3), [1, 2, 3]),
        ((1, 2, 3, 3), [1, 2, 3]),
        ((1, 2, 3, 2, 3, 4), [1, 2, 3, 4]),
        ((5, 6, 1, 2), [1, 2]),
        ((2, 4, 6, 5), [2, 4, 5]),
    ],
)
def test_each_iteration_counts_once(reported: tuple[int, ...], counted: list[int]) -> None:
    """An iteration that comes again takes the place of itself and of all that followed: the last report wins."""
    sequence = filled(*reported)
    assert len(sequence) == len(counted)
    assert [number for number, _ in sequence.values("order")] == counted
    if reported:
        assert sequence.last is not None
        assert sequence.last.metrics["order"] == len(reported) - 1


def test_numbers_outlast_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long job only the newest entries are held whole; all of them are counted, and can be gone back behind."""
    monkeypatch.setattr(module, "REMEMBERED", 10)
    sequence = filled(*range(1, 101))
    assert (len(sequence), len(sequence.values("order"))) == (100, 10)
    sequence.add(Entry(50, {}))
    assert len(sequence) == 50
    assert [entry.iteration for entry in sequence.tail(10)] == [50]


def test_a_job_goes_on_after_its_checkpoint() -> None:
    """What came after it counts no more, evaluations included."""
    history = History()
    for number in range(1, 6):
        history.iterations.add(Entry(number, {}, f"tinker://m/weights/{number}" if number != 5 else ""))
        history.evaluations.add(Entry(number, {"solved": number / 10}))
    point = history.resume_point("tinker://m/weights/start")
    assert point == Point(4, "tinker://m/weights/4")
    history.cut_after(point.iteration)
    assert (len(history.iterations), len(history.evaluations)) == (4, 4)
    history.cut_after(0)
    assert history.resume_point("tinker://m/weights/start") == Point(0, "tinker://m/weights/start")


@pytest.mark.parametrize(
    ("values", "goal", "reached"),
    [
        ([0.1, 0.5, 0.9], Goal("reward", 0.5, True, 1), 2),
        ([0.1, 0.5, 0.9], Goal("reward", 0.5, True, 2), 3),
        ([0.9, 0.1, 0.9, 0.9], Goal("reward", 0.9, True, 2), 4),
        ([0.1, 0.2], Goal("reward", 0.5, True, 1), None),
        ([3.0, 2.0, 1.0], Goal("reward", 2.0, False, 1), 2),
        ([None, 0.6, None, 0.6], Goal("reward", 0.5, True, 2), 4),
        ([0.9], Goal("other", 0.5, True, 1), None),
    ],
)
def test_goal(values: list[float | None], goal: Goal, reached: int | None) -> None:
    """The first iteration in which it holds so many times in a row; those without the metric are passed over."""
    history = History()
    for number, value in enumerate(values, 1):
        history.iterations.add(Entry(number, {} if value is None else {"reward": value}))
    assert history.reached(goal) == reached


def test_best_checkpoint_is_one_that_was_saved() -> None:
    """Of the iterations with a checkpoint and a value of the goal's metric the best, of equals the first."""
    history = History()
    for number, saved in ((1, True), (2, False), (3, True), (4, True), (5, True)):
        history.iterations.add(Entry(number, {}, f"tinker://m/weights/{number}" if saved else ""))
    for number, solved in ((1, 0.2), (2, 0.9), (3, 0.6), (4, 0.6)):
        history.evaluations.add(Entry(number, {"solved": solved}))
    assert history.best(Goal("eval/solved", 1.0, True, 1)) == (Point(3, "tinker://m/weights/3"), 0.6)
    assert history.best(Goal("eval/solved", 0.0, False, 1)) == (Point(1, "tinker://m/weights/1"), 0.2)
    assert history.best(Goal("eval/other", 1.0, True, 1)) is None


def test_pace_goes_by_what_was_seen() -> None:
    """Iterations that were there from the beginning took no time; a new start begins anew."""
    pace = Pace()
    pace.note(100, 0.0)
    assert pace.seconds() is None
    pace.note(100, 5.0)
    pace.note(102, 10.0)
    assert pace.seconds() == 5.0
    pace.note(50, 11.0)
    assert pace.seconds() is None
