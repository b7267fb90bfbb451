"""Kills real processes of a session pod, found from outside the container."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.moments import Running, running


@dataclass(frozen=True, slots=True)
class Process:
    """A process inside a container: its number on the machine and in the container, and its command."""

    pid: int
    inner: int
    command: str


def processes(pids: Iterable[int]) -> list[Process]:
    """What the machine knows of these processes; those that ended meanwhile are left out."""
    found = []
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        inner = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
        found.append(Process(pid, int(inner), command))
    return found


def role(process: Process, engine: int | None) -> str:
    """``supervisor``, ``server``, ``spare`` or ``engine`` (forked from the spare: same command)."""
    if process.inner == 1:
        return "supervisor"
    if process.inner == engine:
        return "engine"
    return process.command.rsplit(" ", 1)[-1]


def send(pids: Iterable[int], victim: str, engine: int | None, number: signal.Signals) -> Process:
    """Send a signal to the process of this role.

    Raises:
        LookupError: no such process; the message lists those that were there.
    """
    seen = processes(pids)
    for process in seen:
        if role(process, engine) == victim:
            os.kill(process.pid, number)
            return process
    raise LookupError(f"no {victim} among {[(p.inner, p.command) for p in seen]}")


def kill(pids: Iterable[int], victim: str, engine: int | None) -> Process:
    """SIGKILL the process of this role. Raises LookupError: no such process."""
    return send(pids, victim, engine, signal.SIGKILL)


def hold(
    dump: Callable[[], list[dict[str, Any]]],
    pids: Iterable[int],
    kind: str,
    seconds: float = 120.0,
) -> Running:
    """Stop the engine in the middle of an operation of ``kind``.

    The engine is left stopped (SIGSTOP), so that what is killed next surely falls into the operation.

    Raises:
        TimeoutError: none was caught in time.
    """
    pids = list(pids)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        now = running(dump())
        if now is not None and now.kind == kind:
            send(pids, "engine", now.engine, signal.SIGSTOP)
            if running(dump()) == now:
                return now
            send(pids, "engine", now.engine, signal.SIGCONT)  # it ended just before it was stopped
        time.sleep(0.02)
    raise TimeoutError(f"no {kind} was caught within {seconds:.0f} s")
