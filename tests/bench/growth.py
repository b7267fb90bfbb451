"""Whether the session pod's memory grows with the number of operations: raw HTTP, a small model, 10,000 of them.

At its default settings the journal is compacted for the first time after about as many. Here it is far more often, and
there are snapshots for it to begin at: memory is looked at across several compactions, as in a session of weeks.
"""

from __future__ import annotations

from pathlib import Path

from tests.bench import pss
from tests.bench.measure import Measure
from tests.bench.roundtrip import Wire, new_model
from tests.bench.stack import Stack, serving
from tests.server import tinymodel
from tests.server.pod import Pod

WARM_UP, OPERATIONS = 1_000, 10_000
RECORDS = 3_000
"""After how many records the journal is compacted; each operation makes three."""
REPLAY_SECONDS = 0.2
COMPACTED = "journal compacted"
GOAL = 1.05
"""Flat within what allocators and caches need to settle."""


def run(place: Path) -> list[Measure]:
    """Raises RuntimeError if an operation does not end as it should."""
    (place / "stack").mkdir()
    tinymodel.write_tiny_model(place / "tiny")
    with serving(place / "stack", tinymodel.NAME, place / "tiny", tinymodel.MAX_LENGTH, _often) as stack:
        before, after = _many(stack)
        compactions = stack.pod.log.read_text().count(COMPACTED)
    return [
        Measure(f"PSS after {OPERATIONS:,} operations / after {WARM_UP:,}", after / before, "x", GOAL),
        Measure("growth for each operation", (after - before) * 1024 / (OPERATIONS - WARM_UP), "KiB"),
        Measure("compactions of the journal meanwhile", compactions, ""),
    ]


def _often(pod: Pod) -> None:
    """Have the journal compacted often, and snapshots taken often."""
    pod.environment["EVERLOOP_COMPACT_AFTER_RECORDS"] = str(RECORDS)
    pod.configure(snapshots={"replayBudgetSeconds": REPLAY_SECONDS})


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
