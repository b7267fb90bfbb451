"""On which machine, and how busy it was."""

from __future__ import annotations

import os
import platform
import statistics
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

FLUSHES = 200
RECORD_BYTES = 300


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures of two runs may differ by. `load` is the number of processes that ran or waited in the last minute,
    `flush_ms` the median milliseconds that writing and flushing one small record took on the disk beneath.
    """

    date: str
    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    load: float
    flush_ms: float


def look(place: Path) -> Machine:
    """Look at this machine; `place` is a directory on the disk that is measured with."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal:"))
    return Machine(
        date=datetime.now(UTC).isoformat(timespec="minutes"),
        cpu=names[0] if names else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory / 2**20, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        load=os.getloadavg()[0],
        flush_ms=round(_flush_seconds(place / "flush-probe") * 1e3, 2),
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _flush_seconds(path: Path) -> float:
    taken = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for _ in range(FLUSHES):
            began = time.perf_counter()
            os.write(descriptor, bytes(RECORD_BYTES))
            os.fdatasync(descriptor)
            taken.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
        path.unlink()
    return statistics.median(taken)
