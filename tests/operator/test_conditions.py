"""Conditions from one pass to the next: what is as it was stays, and whatever changed shows."""

from __future__ import annotations

from typing import Any

import pytest

from everloop_operator.core import conditions
from everloop_operator.core.aspect import Aspect
from tests.operator.builders import NOW, ago, text

SAID = Aspect(True, "AsExpected", "pod tuned-a1-0 is ready")
BEFORE = conditions.update([], {"PodsReady": SAID}, generation=1, now=ago(60))


def test_what_is_as_it_was_keeps_its_time() -> None:
    """Nothing of it is written again."""
    assert conditions.update(BEFORE, {"PodsReady": SAID}, generation=1, now=NOW) == BEFORE


@pytest.mark.parametrize(
    ("aspect", "generation", "shown"),
    [
        (
            Aspect(False, "AsExpected", SAID.message),
            1,
            {"status": "False", "last_transition_time": text(NOW).replace("Z", ".000Z")},
        ),
        (Aspect(True, "Serving", SAID.message), 1, {"reason": "Serving"}),
        (Aspect(True, "AsExpected", "pod tuned-a2-0 is ready"), 1, {"message": "pod tuned-a2-0 is ready"}),
        (SAID, 2, {"observed_generation": 2}),
    ],
)
def test_any_change_shows(aspect: Aspect, generation: int, shown: dict[str, Any]) -> None:
    """Each field by itself; the time moves with the status only."""
    after = conditions.update(BEFORE, {"PodsReady": aspect}, generation=generation, now=NOW)
    assert after == [BEFORE[0].model_copy(update=shown)]
