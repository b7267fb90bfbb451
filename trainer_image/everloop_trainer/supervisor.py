"""PID 1 of the session pod: keeps `server` and `spare` running as siblings, and reaps what they leave behind.

It imports the standard library only, so that nothing which can break a trainer can break the process that restarts it.
Engines are forked by the spare into sessions of their own; when the spare dies they are re-parented to this process and
go on working. An engine ends itself when its server is gone (end of file on its socket).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everloop_trainer.exitcodes import ACCELERATOR_FAILED, FINAL

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 5.0
STABLE_AFTER_SECONDS = 30.0
STOP_SECONDS = 5.0
"""How long the spare and the engines may take to end once the server has drained."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WAKE = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
_libc = ctypes.CDLL(None, use_errno=True)


def restart_delay(previous: float, lived: float) -> float:
    """Seconds to wait before the next start of a child that lived `lived` seconds and waited `previous` before it."""
    if previous == 0.0 or lived >= STABLE_AFTER_SECONDS:
        return FIRST_DELAY_SECONDS
    return min(2 * previous, LONGEST_DELAY_SECONDS)


@dataclass(slots=True)
class Child:
    """One of the two processes that must always run; `pid` is 0 while it is down."""

    name: str
    argv: Sequence[str]
    pid: int = 0
    started: float = 0.0
    delay: float = 0.0
    start_at: float = 0.0


class Supervisor:
    """Runs until SIGTERM or SIGINT, until the server ends with a final code, or until an accelerator has failed.

    `run` returns the exit code.
    """

    def __init__(self, server: Sequence[str], spare: Sequence[str]) -> None:
        self._server = Child("server", server)
        self._children = [self._server, Child("spare", spare)]
        self._stopping = False
        self._exit_code: int | None = None

    def run(self) -> int:
        """Keeps the children running; see the class."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
        if os.getpid() != 1:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        while self._exit_code is None:
            self._start_due()
            self._wait_for_signal()
            self._reap()
            if self._stopping and self._server.pid == 0:
                self._exit_code = self._exit_code or 0
        self._stop_rest()
        return self._exit_code

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.pid == 0 and not self._stopping and child.start_at <= now:
                child.pid = spawn(child.argv)
                child.started = now
                log("started", child=child.name, child_pid=child.pid)

    def _wait_for_signal(self) -> None:
        due = [child.start_at for child in self._children if child.pid == 0 and not self._stopping]
        timeout = max(0.0, min(due) - time.monotonic()) if due else 3600.0
        received = signal.sigtimedwait(_WAKE, timeout)
        if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
            log("stopping", signal=signal.Signals(received.si_signo).name)
            self._stopping = True
            if self._server.pid:
                os.kill(self._server.pid, signal.SIGTERM)

    def _reap(self) -> None:
        for pid, code in reap_all():
            child = next((child for child in self._children if child.pid == pid), None)
            if child is None:
                log("reaped", orphan_pid=pid, exit_code=code)
                self._check_accelerator(code)
            else:
                self._ended(child, code)

    def _ended(self, child: Child, code: int) -> None:
        lived = time.monotonic() - child.started
        child.pid = 0
        child.delay = restart_delay(child.delay, lived)
        child.start_at = time.monotonic() + child.delay
        log("ended", child=child.name, exit_code=code, lived_seconds=round(lived, 3), restart_in_seconds=child.delay)
        if child is self._server and (self._stopping or code in FINAL):
            self._exit_code = code
        self._check_accelerator(code)

    def _check_accelerator(self, code: int) -> None:
        """The spare ends like an engine that found its accelerator broken; one without a spare is our own child."""
        if code == ACCELERATOR_FAILED and not self._stopping:
            self._exit_code = code

    def _stop_rest(self) -> None:
        """Ends the spare, then waits for the engines, which end by themselves; kills what is left."""
        for child in self._children:
            if child.pid:
                os.kill(child.pid, signal.SIGTERM)
        give_up = time.monotonic() + STOP_SECONDS
        while has_children():
            if time.monotonic() >= give_up:
                for pid in own_children():
                    os.kill(pid, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            for pid, code in reap_all():
                log("reaped", orphan_pid=pid, exit_code=code)


def spawn(argv: Sequence[str]) -> int:
    """Starts `argv` with an empty signal mask; it is killed should this process die (PID 1's death kills it anyway)."""
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execv(argv[0], list(argv))  # noqa: S606 - the arguments are our own
    finally:
        os._exit(127)


def reap_all() -> list[tuple[int, int]]:
    """(pid, exit code) of every child that has ended; a signal n counts as code 128 + n."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended.append((pid, code if code >= 0 else 128 - code))


def has_children() -> bool:
    """Whether any child is left, running or ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def own_children() -> list[int]:
    """Process ids of all children, adopted ones too."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def log(event: str, **fields: object) -> None:
    """One JSON line, in the shape of the server's own log."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    line = json.dumps({"event": event, "level": "info", "component": "supervisor", "timestamp": f"{stamp}Z", **fields})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Runs the session pod; returns the container's exit code."""
    module = [sys.executable, "-m", "everloop_trainer"]
    return Supervisor(server=[*module, "server"], spare=[*module, "spare"]).run()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno() or errno.EINVAL
        raise OSError(code, os.strerror(code))
