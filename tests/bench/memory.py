"""Memory of the session pod against that of the bare loop.

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
from tests.bench.stack import serving

STEPS = 6
LOOK_SECONDS = 0.05
GOAL = 1.3


def run(place: Path) -> list[Measure]:
    """Raises RuntimeError if a loop ends before its time."""
    (place / "stack").mkdir()
    with serving(place / "stack") as stack, stack.loop(BATCH, LENGTH, RANK) as ours:
        adapter = (place / "begin").with_suffix(".safetensors")
        adapter.write_bytes(checkpoint_file(stack.pod.root, ours.told["saved"]).read_bytes())
        pod = _peak(ours, stack.pod.container.pid)
    with bare_loop(adapter, BATCH, LENGTH, RANK, place / "bare.log") as bare:
        alone = _peak(bare, bare.process.pid)
    return [
        Measure("all trainer processes / bare loop, greatest PSS during steps", pod / alone, "x", GOAL),
        Measure("all trainer processes, SmolLM2-135M", pod, "MiB"),
        Measure("bare loop, SmolLM2-135M", alone, "MiB"),
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
