"""``make bench [ONLY=loop]``: measure, print a table, and write ``build/bench.json`` and ``build/bench.png``.

Figures of benches that were not run now stay as they were. The exit status says whether each could be measured; what a
machine reaches of the goals is in the table.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType

from tests.bench import machine, picture, report

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build"
BENCHES = {
    "loop": "a training loop over HTTP against the same loop in bare PyTorch and PEFT",
    "sampling": "single samples that arrive one by one against `generate` batched by hand",
    "roundtrip": "an operation without data, over raw HTTP through the gateway",
    "journal": "small operations of 64 clients on a slow disk",
    "memory": "memory of all trainer processes against the bare loop's",
    "growth": "memory of all trainer processes after 10,000 operations",
    "replay": "replay against the original",
    "recovery": "the time it takes to come back: engine, server, spare, pod, node, on the local cluster",
    "restart": "opening a session of 100,000 operations",
    "scale": "an operator that starts anew over 10,000 sessions, and loses one node of 1,000",
    "keys": "an API key's effect, and its revocation",
}


def measure(name: str) -> report.Report:
    """Run one bench in a directory of its own on the checkout's disk (not in memory: flushes shall cost)."""
    BUILD.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=BUILD))
    try:
        before = machine.look(place)
        measures = importlib.import_module(f"tests.bench.{name}").run(place)
        return report.Report(before, os.getloadavg()[0], tuple(measures))
    finally:
        shutil.rmtree(place)


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", choices=BENCHES, action="append", help="run this one only")
    wanted = parser.parse_args().only or list(BENCHES)
    failed = []
    for name in wanted:
        print(f"bench {name}: {BENCHES[name]}", flush=True)
        try:
            found = measure(name)
        except Exception:  # noqa: BLE001 - the others can be measured all the same; the exit status tells
            traceback.print_exc()
            failed.append(name)
            continue
        reports = report.read(BUILD / "bench.json") | {name: found}
        ordered = {each: reports[each] for each in BENCHES if each in reports}
        report.write(BUILD / "bench.json", ordered)
        picture.draw(ordered, BUILD / "bench.png")
        print(report.table({name: found}), flush=True)
    print(f"\n{report.table(report.read(BUILD / 'bench.json'))}")
    for name in failed:
        print(f"bench {name}: FAILED", file=sys.stderr)
    return 1 if failed else 0


def interrupted(_signal: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does: whatever a bench has started goes."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    sys.exit(main())
