"""Whether the session pod's memory grows with the number of operations: raw HTTP, a small model, 10,000 of them."""

from __future__ import annotations

from pathlib import Path

from tests.bench import pss
from tests.bench.measure import Measure
from tests.bench.roundtrip import Wire, new_model
from tests.bench.stack import Stack, serving
from tests.server import tinymodel

WARM_UP, OPERATIONS = 1_000, 10_000
GOAL = 1.05
"""Flat within what allocators and caches need to settle."""


def run(place: Path) -> list[Measure]:
    """Raises RuntimeError if an operation does not end as it should."""
    (place / "stack").mkdir()
    tinymodel.write_tiny_model(place / "tiny")
    with serving(place / "stack", tinymodel.NAME, place / "tiny", tinymodel.MAX_LENGTH) as stack:
        before, after = _many(stack)
    return [
        Measure(f"PSS after {OPERATIONS:,} operations / after {WARM_UP:,}", after / before, "x", GOAL),
        Measure("growth for each operation", (after - before) * 1024 / (OPERATIONS - WARM_UP), "KiB"),
    ]


def _many(stack: Stack) -> tuple[float, float]:
    """MiB of the pod after the first and after the last of many operations of a small model: raw HTTP at its door."""
    wire = Wire(stack.pod.url, stack.pod.headers)
    gateway = Wire(stack.gateway.url, {"X-API-Key": stack.key})
    model = new_model(stack, gateway)
    before = 0.0
    for seq in range(1, OPERATIONS + 1):
        wire.finish(wire.optim_step(model, seq))
        if seq == WARM_UP:
            before = pss.mib(pss.tree(stack.pod.container.pid))
    after = pss.mib(pss.tree(stack.pod.container.pid))
    wire.close()
    gateway.close()
    return before, after
