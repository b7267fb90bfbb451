"""The processes of one session pod, found and stopped from outside the container."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from demo import faults
from devcluster.processes import Process, is_stopped, start_ticks

LONGEST_WAIT_SECONDS = 2.0
REST_SECONDS = 0.02
"""In which a server that has been told something computes more than a twentieth of it."""
_CPUCLOCK_SCHED = 2
"""With the process's number this is the clock that clock_getcpuclockid(3) gives, which Python lacks."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The processes of a session pod at an instant, as the machine numbers them."""

    name: str
    node: str
    engine: Process
    server: Process
    spare: Process
    supervisor: Process

    def all(self) -> list[Process]:
        """Its four processes."""
        return [self.engine, self.server, self.spare, self.supervisor]


def find(name: str, node: str, pids: list[int]) -> Pod | None:
    """The pod's processes, or None while one is missing.

    An engine is a fork of the spare and has its command, but leads a session of its own.
    """
    roles: dict[str, Process] = {}
    for process in faults.processes(pids):
        ticks = start_ticks(process.pid)
        role = faults.role(process, None)
        if role == "spare" and _leads_session(process.pid):
            role = "engine"
        if ticks is not None and (role not in roles or roles[role].ticks < ticks):
            roles[role] = Process(process.pid, ticks)
    if not {"engine", "server", "spare", "supervisor"} <= roles.keys():
        return None
    return Pod(name, node, roles["engine"], roles["server"], roles["spare"], roles["supervisor"])


def find_spare(pids: list[int]) -> Process | None:
    """The spare of a pod that has no engine yet."""
    for process in faults.processes(pids):
        ticks = start_ticks(process.pid)
        if ticks is not None and faults.role(process, None) == "spare" and not _leads_session(process.pid):
            return Process(process.pid, ticks)
    return None


def find_engine(spare: Process) -> Process | None:
    """The newest engine that this spare has forked: quicker than `find`."""
    try:
        pids = Path(f"/proc/{spare.pid}/task/{spare.pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    engines = [Process(int(pid), ticks) for pid in pids if (ticks := start_ticks(int(pid))) is not None]
    return max((e for e in engines if _leads_session(e.pid)), key=lambda engine: engine.ticks, default=None)


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def stop(process: Process) -> None:
    """Stop a process (SIGSTOP); returns once none of its threads runs. Raises LookupError if it has ended."""
    while process.alive():
        process.kill(signal.SIGSTOP)
        if is_stopped(process.pid):
            return
        time.sleep(0.0005)
    raise LookupError(f"process {process.pid} has ended")


def go_on(process: Process) -> None:
    """Let a stopped process go on; does nothing if it has ended."""
    process.kill(signal.SIGCONT)


def run_on(process: Process, seconds: float) -> None:
    """Let a stopped process go on for about so long, by its own CPU time, and stop it again.

    It is stopped too if it had nothing to compute for `LONGEST_WAIT_SECONDS`. Raises LookupError if it has ended.
    """
    start, deadline = cpu_seconds(process), time.monotonic() + LONGEST_WAIT_SECONDS
    go_on(process)
    while cpu_seconds(process) - start < seconds and time.monotonic() < deadline:
        pass  # no sleep is as short as what is waited for
    stop(process)


def wait_at_rest(process: Process) -> None:
    """Wait, `LONGEST_WAIT_SECONDS` at most, until a process computes next to nothing: it has seen to what it was told.

    Raises LookupError if it has ended.
    """
    before, deadline = cpu_seconds(process), time.monotonic() + LONGEST_WAIT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(REST_SECONDS)
        now = cpu_seconds(process)
        if now - before < REST_SECONDS / 20:
            return
        before = now


def cpu_seconds(process: Process) -> float:
    """CPU time that all threads of a process have used. Raises LookupError if it has ended."""
    try:
        return time.clock_gettime((~process.pid << 3) | _CPUCLOCK_SCHED)
    except OSError as error:
        raise LookupError(f"process {process.pid} has ended") from error
