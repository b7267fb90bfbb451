"""A training loop through gateway, journal and engine against the same loop in bare PyTorch and PEFT.

The two take turns (each stands still while the other runs), the order within a pair alternates, and the figure is the
median of the pairs' ratios. Both begin with the same adapter and see the same tokens, so their losses must agree.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from demo.adapters import checkpoint_file
from tests.bench.driven import PROGRAMS, Driven, Lap
from tests.bench.measure import Measure, of_samples
from tests.bench.stack import THREADS, serving
from tests.prepared import base_model

BATCH, LENGTH, RANK = 4, 64, 32
PAIRS, STEPS = 8, 4
WARM_UP_STEPS = 2
AGREEMENT = 1e-5
"""Relative difference of two losses that float32 sums in different orders may grow to in so many steps; two adapters
that differ in nothing but their initial values are further apart after the first step."""
GOAL = 1.05


def run(place: Path) -> list[Measure]:
    """Raises ValueError if the losses differ: then it was not the same loop, and no ratio counts."""
    with serving(place) as stack, stack.loop(BATCH, LENGTH, RANK) as ours:
        adapter = checkpoint_file(stack.pod.root, ours.told["saved"])
        with bare_loop(adapter, BATCH, LENGTH, RANK, place / "bare.log") as bare:
            warm = bare.lap(WARM_UP_STEPS), ours.lap(WARM_UP_STEPS)
            pairs = [_pair(bare, ours, number % 2 == 0) for number in range(PAIRS)]
    difference = _difference([warm, *pairs])
    if not difference <= AGREEMENT:
        raise ValueError(f"the losses differ by {difference:.1e} of their size: these are not the same loops")
    size = f"{BATCH} x {LENGTH} tokens, rank {RANK}, {THREADS} thread"
    return [
        of_samples("loop over HTTP / bare loop", [b.seconds / a.seconds for a, b in pairs], "x", GOAL),
        of_samples(f"step of the bare loop ({size})", [a.seconds / STEPS * 1e3 for a, _ in pairs], "ms"),
        of_samples(f"step over HTTP ({size})", [b.seconds / STEPS * 1e3 for _, b in pairs], "ms"),
        Measure(f"greatest relative difference of two losses in {WARM_UP_STEPS + PAIRS * STEPS} steps", difference, ""),
    ]


def bare_loop(adapter: Path, batch: int, length: int, rank: int, log: Path) -> Driven:
    """`bare.py`, ready to make steps."""
    command = [sys.executable, str(PROGRAMS / "bare.py"), str(base_model()), str(adapter)]
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(THREADS)}
    return Driven([*command, *map(str, (batch, length, rank, THREADS))], environment, log)


def _pair(bare: Driven, ours: Driven, bare_first: bool) -> tuple[Lap, Lap]:
    if bare_first:
        first = bare.lap(STEPS)
        return first, ours.lap(STEPS)
    second = ours.lap(STEPS)
    return bare.lap(STEPS), second


def _difference(pairs: Sequence[tuple[Lap, Lap]]) -> float:
    differences = [
        abs(theirs - ours) / abs(theirs) for a, b in pairs for theirs, ours in zip(a.losses, b.losses, strict=True)
    ]
    return math.nan if any(math.isnan(value) for value in differences) else max(differences)
