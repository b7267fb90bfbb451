"""Memory of the session pod against that of the bare loop, and how it grows with the number of operations.

The same loop runs in both, one after the other, so that neither shares the pages of its libraries with the other. What
counts is the greatest sum of all trainer processes (supervisor, server, spare, engine) while steps run.
"""

from __future__ import annotations

import threading
from pathlib import Path

from demo.adapters import checkpoint_file
from tests.bench import pss
from tests.bench.driven import Driven
from tests.bench.loop import BATCH, LENGTH, RANK, bare_loop
from tests.bench.measure import Measure
from tests.bench.roundtrip import Wire, new_model
from tests.bench.stack import Stack, serving
from tests.server import tinymodel

STEPS = 6
LOOK_SECONDS = 0.05
GOAL = 1.3
WARM_UP, OPERATIONS = 1_000, 10_000
GROWTH_GOAL = 1.05
"""Flat within what allocators and caches need to settle."""


def run(place: Path) -> list[Measure]:
    """Raises RuntimeError if an operation does not end as it should."""
    for name in ("loop", "many"):
        (place / name).mkdir()
    with serving(place / "loop") as stack, stack.loop(BATCH, LENGTH, RANK) as ours:
        adapter = (place / "begin").with_suffix(".safetensors")
        adapter.write_bytes(checkpoint_file(stack.pod.root, ours.told["saved"]).read_bytes())
        pod = _peak(ours, stack.pod.container.pid)
    with bare_loop(adapter, BATCH, LENGTH, RANK, place / "bare.log") as bare:
        alone = _peak(bare, bare.process.pid)
    tinymodel.write_tiny_model(place / "tiny")
    with serving(place / "many", tinymodel.NAME, place / "tiny", tinymodel.MAX_LENGTH) as stack:
        before, after = _many(stack)
    return [
        Measure("all trainer processes / bare loop, greatest PSS during steps", pod / alone, "x", GOAL),
        Measure("all trainer processes, SmolLM2-135M", pod, "MiB"),
        Measure("bare loop, SmolLM2-135M", alone, "MiB"),
        Measure(f"PSS after {OPERATIONS:,} operations / after {WARM_UP:,}", after / before, "x", GROWTH_GOAL),
        Measure("growth for each operation", (after - before) * 1024 / (OPERATIONS - WARM_UP), "KiB"),
    ]


def _peak(loop: Driven, root: int) -> float:
    """The greatest sum over the processes below `root` while `loop` makes its steps, in MiB."""
    loop.lap(1)
    done = threading.Event()
    seen: list[float] = []

    def look() -> None:
        while not done.wait(LOOK_SECONDS):
            seen.append(pss.mib(pss.tree(root)))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        loop.lap(STEPS)
    finally:
        done.set()
        looking.join()
    return max(seen)


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
