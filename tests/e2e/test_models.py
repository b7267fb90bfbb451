"""Models that share one base do not feel each other."""

from __future__ import annotations

import pytest

from demo import adapters
from tests.e2e.world import Everloop

pytestmark = pytest.mark.cluster

STEPS = 4


def test_models_trained_in_turns_equal_those_trained_alone(everloop: Everloop) -> None:
    """Ranks 4 and 16, step by step in one session, are bit-equal to each on its own."""
    prints: dict[str, dict[int, str]] = {}
    for name, ranks in (("together", ("4", "16")), ("alone-4", ("4",)), ("alone-16", ("16",))):
        loop = everloop.loop(name, "--steps", str(STEPS), "--ranks", *ranks)
        loop.start()
        try:
            list(loop.follow())
        finally:
            loop.stop()
        prints[name] = {
            entry["rank"]: adapters.fingerprint(everloop.session.adapter(entry["path"]))
            for entry in everloop.ledger(name)
            if entry["event"] == "saved" and entry["step"] == STEPS
        }
    assert prints["together"] == {4: prints["alone-4"][4], 16: prints["alone-16"][16]}
    assert prints["together"][4] != prints["together"][16]
