"""Twenty kills at random, some of two at once, in whatever runs then; ``make soak`` goes on for as long as asked."""

from __future__ import annotations

import random

import pytest

from tests.e2e.world import Everloop
from tests.soak.leg import LINGER_SECONDS, SECOND_VICTIM, compare, drive, start

pytestmark = pytest.mark.cluster

KILLS = 20


def test_loop_under_random_kills_equals_the_unbroken_one(everloop: Everloop, seed: int) -> None:
    """No exception, nothing done twice, the same results and the same adapter."""
    stop = everloop.directory / "stop"
    broken = start(everloop, "random", seed, "--until", str(stop), "--linger", str(LINGER_SECONDS))
    try:
        struck = drive(everloop, broken, KILLS, random.Random(seed), print)
        stop.touch()
        path = broken.finish()
    finally:
        broken.loop.stop()
    steps, fault = compare(everloop, broken, path, seed)
    assert fault == ""
    assert steps > 0
    assert struck.together == KILLS // SECOND_VICTIM
    assert struck.victims.total() == KILLS + struck.together
