"""Replay against the original: the same steps, as they first ran and as they run again after the engine was killed."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from tests.bench.loop import BATCH, LENGTH, RANK
from tests.bench.measure import Measure, of_samples
from tests.bench.podlog import Event, events
from tests.bench.stack import Stack, serving
from tests.server.pod import eventually

WANTED_STEPS, LAPS = 24, 40
"""Replayed steps after which it is enough, and kills after which it has to be."""
STEPS = 3
OPERATIONS_OF_A_STEP = 2
GOAL = 1.0


def run(place: Path) -> list[Measure]:
    """Raises ValueError if there was nothing to replay: then every kill fell right after a snapshot."""
    first: list[float] = []
    again: list[float] = []
    replayed = 0
    with serving(place) as stack, stack.loop(BATCH, LENGTH, RANK) as loop:
        loop.lap(1)
        for _ in range(LAPS):
            first.append(loop.lap(STEPS).seconds / STEPS)
            restored = _kill_engine(stack)
            steps = restored.fields["replayed"] // OPERATIONS_OF_A_STEP
            if steps:
                again.append(restored.fields["replay_seconds"] / steps)
                replayed += steps
            if replayed >= WANTED_STEPS:
                break
    if not again:
        raise ValueError("no operation was replayed")
    return [
        Measure("a step replayed / the step as its client first saw it", median(again) / median(first), "x", GOAL),
        of_samples(
            f"a step replayed ({replayed} steps after {len(again)} kills)", [each * 1e3 for each in again], "ms"
        ),
        of_samples("a step as its client first saw it", [each * 1e3 for each in first], "ms"),
    ]


def _kill_engine(stack: Stack) -> Event:
    """Between two steps, so that whole steps are replayed; returns what the server says of the restored model."""
    status = stack.pod.status()
    assert status is not None
    began = datetime.now(UTC)
    os.kill(status["engine"]["pid"], signal.SIGKILL)

    def restored() -> Event | None:
        found = [event for event in events([stack.pod.log], began) if event.name == "model restored"]
        return found[0] if found else None

    return eventually(restored, "the model in a new engine")
