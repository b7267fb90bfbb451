"""When a model is snapshotted."""

from __future__ import annotations

import pytest

from everloop_trainer.session.snapshotting import interval


@pytest.mark.parametrize(
    ("budget", "writing", "seconds"),
    [
        (20.0, 0.0, 2.0),  # the first one, whose cost is not known yet
        (20.0, 0.05, 2.0),
        (20.0, 0.4, 8.0),  # 5 % of the engine's time
        (20.0, 3.0, 20.0),  # never beyond the budget, whatever it costs
        (1.0, 0.4, 1.0),
    ],
)
def test_snapshots_come_as_often_as_they_are_cheap(budget: float, writing: float, seconds: float) -> None:
    """The interval follows the cost of the last snapshot, between a floor and the budget."""
    assert interval(budget, writing) == pytest.approx(seconds)
