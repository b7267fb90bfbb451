"""How requests are drawn: so many that `make test` has the time for, or many times as many."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.fuzz import bodies
from tests.whole import WHOLE

TIMES = 40 if WHOLE else 1


def drawing(examples: int) -> settings:
    """So many examples, or many times as many."""
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def requests(valid: dict[str, bodies.Body]) -> st.SearchStrategy[tuple[str, str]]:
    """An endpoint's name, and the text of a body for it that is right, or was before something was done to it."""
    return st.sampled_from(sorted(valid)).flatmap(
        lambda name: st.tuples(st.just(name), bodies.broken(valid[name]) | st.just(bodies.text(valid[name])))
    )
