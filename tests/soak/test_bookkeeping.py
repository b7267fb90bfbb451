"""What a soak counts, keeps and compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.moments import Running, running
from tests.soak.ledger import difference, done_twice
from tests.soak.state import Leg, State


def leg(number: int, kills: int, fault: str = "") -> Leg:
    """A leg that struck only engines."""
    return Leg(number, kills, kills // 2, 100, 60.0, {"engine": kills}, fault)


def test_a_soak_is_found_again_as_it_was_saved(tmp_path: Path) -> None:
    """Seed, legs and the cluster that may still be there."""
    state = State(7, 300, [leg(1, 50)], begun=2, cluster="/tmp/cluster")
    state.save(tmp_path)
    assert State.load(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_only_legs_that_ended_well_count() -> None:
    """One that failed, or was begun and cut short, is done again."""
    state = State(7, 120, [leg(1, 50), leg(2, 50, "done twice: s:1"), leg(3, 50)], begun=5)
    assert (state.proven, state.struck) == (100, {"engine": 100})
    assert state.next_leg(50) == 20
    state.legs.append(leg(6, 20))
    assert state.next_leg(50) == 0


def record(kind: str, number: int) -> dict[str, Any]:
    """A record of the journal."""
    return {"t": kind, "s": "s", "n": number}


@pytest.mark.parametrize("kind", ["accept", "result"])
def test_an_operation_done_twice_is_seen(kind: str) -> None:
    """Accepted or finished a second time; started again is none."""
    once = [{"t": "open", "n": 1}, record("accept", 1), record("try", 1), record("try", 1), record("result", 1)]
    assert done_twice(once) == []
    assert done_twice([*once, record(kind, 1)]) == ["s:1"]


def test_what_runs_is_seen_across_the_files_of_an_incarnation() -> None:
    """Another file of the journal ends nothing; another incarnation does."""
    begun = [{**record("accept", 1), "k": "optim_step"}, {**record("try", 1), "engine": 7}]
    assert running([*begun, {"t": "open", "n": 1, "segment": 1}]) == Running("s", 1, "optim_step", 7)
    assert running([*begun, {"t": "open", "n": 2, "segment": 0}]) is None


def test_a_ledger_that_differs_is_seen() -> None:
    """In a line, or in its length."""
    assert difference(["a", "b"], ["a", "b"]) == ""
    assert difference(["a", "b"], ["a", "c"]) == "result 2: b is not c"
    assert difference(["a"], ["a", "b"]) == "result 2: nothing is not b"
