"""Processes by what /proc says: whose they are, whether they live, how to end all of them.

Every process of a cluster, those in containers included, has the cluster's root in its environment, and its node's name
if it belongs to a node. That finds them all, whoever started them and whatever became of the files that recorded them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT_VARIABLE = "EVERLOOP_DEVCLUSTER"
NODE_VARIABLE = "EVERLOOP_DEVCLUSTER_NODE"
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told from a later one with its number by the time it started."""

    pid: int
    ticks: int
    """Start time in clock ticks since boot."""

    def alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        return start_ticks(self.pid) == self.ticks

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; does nothing when the process has ended."""
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def save(self, path: Path) -> None:
        """Record it in a file."""
        path.write_text(f"{self.pid} {self.ticks}")

    @classmethod
    def load(cls, path: Path) -> Process | None:
        """Return the living process that a file records."""
        try:
            pid, ticks = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        process = cls(int(pid), int(ticks))
        return process if process.alive() else None


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None for one that has ended, zombies included."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def all_pids() -> Iterator[int]:
    """Yield the number of every process."""
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def marked(root: Path, node: str | None = None) -> list[Process]:
    """Return the living processes of a cluster, or of one of its nodes."""
    found = []
    wanted = {f"{ROOT_VARIABLE}={root}"} | ({f"{NODE_VARIABLE}={node}"} if node else set())
    for pid in all_pids():
        environment = read_environment(pid)
        if wanted <= environment and pid != os.getpid():
            ticks = start_ticks(pid)
            if ticks is not None:
                found.append(Process(pid, ticks))
    return found


def cluster_roots() -> set[Path]:
    """Return the roots of all clusters that have a process on this machine."""
    mark = f"{ROOT_VARIABLE}="
    return {
        Path(entry.removeprefix(mark))
        for pid in all_pids()
        for entry in read_environment(pid)
        if entry.startswith(mark)
    }


def read_environment(pid: int) -> set[str]:
    """Return the entries of a process's environment as it was started with; empty for one that has ended."""
    try:
        return set((PROC / str(pid) / "environ").read_text(errors="replace").split("\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()


def kill_marked(root: Path, node: str | None = None, spare: frozenset[int] = frozenset(), seconds: float = 20) -> None:
    """Kill the processes of a cluster or node until none is left, but for the pids in `spare`.

    Raises:
        TimeoutError: some could not be killed.
    """
    _signal_all(lambda: [each for each in marked(root, node) if each.pid not in spare], signal.SIGKILL, root, seconds)


def stop_marked(root: Path, node: str, seconds: float = 20) -> None:
    """Stop (SIGSTOP) the processes of a node until none of their threads runs any more.

    Raises:
        TimeoutError: some did not stop.
    """
    _signal_all(
        lambda: [each for each in marked(root, node) if not is_stopped(each.pid)], signal.SIGSTOP, root, seconds
    )


def _signal_all(find: Callable[[], list[Process]], number: signal.Signals, root: Path, seconds: float) -> None:
    """Signal what is found until nothing is: a process that still ran may have started another meanwhile."""
    deadline = time.monotonic() + seconds
    clean_scans = 0
    while clean_scans < 2:  # a process that is just replacing its program has no environment to see
        left = find()
        for process in left:
            process.kill(number)
        clean_scans = 0 if left else clean_scans + 1
        if time.monotonic() > deadline:
            raise TimeoutError(f"{root}: {number.name} did not reach {[p.pid for p in left]} in {seconds} s")
        time.sleep(0.01)


def is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs: each was stopped by a signal, or has ended."""
    try:
        threads = [thread.read_text() for thread in (PROC / str(pid) / "task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return not (PROC / str(pid)).exists()  # a thread that ended while it was looked at
    return all(thread.rsplit(")", 1)[1].split()[0] in "TtZX" for thread in threads)


def command_line(pid: int) -> list[str]:
    """Return a process's arguments; empty for one that has ended."""
    try:
        return (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []
