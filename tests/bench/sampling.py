"""Single requests that arrive one by one, through gateway, journal and engine, against `generate` batched by hand.

The two take turns, each standing still while the other runs; the figure is the median of the pairs' ratios. Both take
the likeliest token, so that what they write must agree, but for ties that float32 decides otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.driven import PROGRAMS, Driven
from tests.bench.measure import Measure, of_samples
from tests.bench.stack import THREADS, serving
from tests.prepared import base_model

PROMPT, COMPLETION = 32, 64
"""Tokens."""
REQUESTS, BATCH = 64, 32
PAIRS = 3
SIZES = (1, 8, 32, 64)
"""Requests at a time whose throughput is told."""
AGREEMENT = 0.9
"""Share of equal completions below which the two did not do the same."""
GOAL = 1.0


def run(place: Path) -> list[Measure]:
    """Raises ValueError if the completions differ: then no ratio counts."""
    with (
        serving(place) as stack,
        stack.samples(PROMPT, COMPLETION) as ours,
        bare_samples(base_model(), PROMPT, COMPLETION, place / "bare.log") as bare,
    ):
        return compare(ours, bare, COMPLETION, REQUESTS, SIZES)


def bare_samples(model: Path, prompt: int, completion: int, log: Path) -> Driven:
    """`bare_samples.py`, ready to sample."""
    command = [sys.executable, str(PROGRAMS / "bare_samples.py"), str(model)]
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(THREADS)}
    return Driven([*command, *map(str, (prompt, completion, BATCH, THREADS))], environment, log)


def compare(ours: Driven, bare: Driven, completion: int, requests: int, sizes: Sequence[int]) -> list[Measure]:
    """Let both warm up and take turns, then ours alone with each number of requests at a time."""
    bare.ask(1)
    ours.ask(1)
    pairs = [(bare.ask(requests), ours.ask(requests)) for _ in range(PAIRS)]
    same = min(agreement(theirs["tokens"], mine["tokens"]) for theirs, mine in pairs)
    if same < AGREEMENT:
        raise ValueError(f"{same:.0%} of the completions are equal: these are not the same samples")

    def speed(told: dict[str, Any]) -> float:
        return len(told["tokens"]) * completion / float(told["seconds"])

    lengths = f"{PROMPT} + {completion} tokens, {THREADS} thread"
    ratios = [speed(mine) / speed(theirs) for theirs, mine in pairs]
    return [
        Measure(
            f"{requests} single requests / `generate` batched by hand at {BATCH}, tokens/s",
            sorted(ratios)[len(ratios) // 2],
            "x",
            GOAL,
            at_least=True,
            samples=tuple(ratios),
        ),
        of_samples(
            f"`generate` batched by hand at {BATCH} ({lengths})", [speed(each) for each, _ in pairs], "tokens/s"
        ),
        *(Measure(f"{size} single requests at a time", speed(ours.ask(size)), "tokens/s") for size in sizes),
        Measure("equal completions, the least of all pairs", same, ""),
    ]


def agreement(theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> float:
    """The share of completions that are equal token by token. Raises ValueError if there are not as many of both."""
    equal = [list(a) == list(b) for a, b in zip(theirs, ours, strict=True)]
    return sum(equal) / len(equal)
