"""How much memory a tree of processes takes: each shared page divided among those who share it, and summed up."""

from __future__ import annotations

from pathlib import Path

from tests.server.pod import children


def tree(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for pid in found:
        found += children(pid)
    return found


def mib(pids: list[int]) -> float:
    """Proportional set size of these processes in MiB (Linux, /proc/<pid>/smaps_rollup)."""
    return sum(_kib(pid) for pid in pids) / 1024


def _kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it ended between two looks
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
