"""Starts a container and stays with it: writes its output in the CRI log format, waits, leaves exit.json.

`run` returns once the program has been executed (status 0) or could not be (status 1, reason on standard error). A
daemon stays behind. It depends on nobody, so the runtime may be restarted at will. If the daemon itself is killed, so
is the container (PR_SET_PDEATHSIG on the first process of its PID namespace).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from devcluster.shim import linux, rootfs
from devcluster.shim.enter import become, exit_code
from devcluster.shim.linux import StartError

LONGEST_LINE = 16384  # bytes; the CRI splits longer ones


def run(directory: Path) -> int:
    """Start the container described by spec.json and return 0, or 1 if it could not be started."""
    spec = json.loads((directory / "spec.json").read_text())
    ready, report = os.pipe()
    if os.fork():  # the caller's child: wait for the daemon's word
        os.close(report)
        error = os.read(ready, 65536).decode()
        if error:
            print(error, file=sys.stderr)
        return 1 if error else 0
    os.close(ready)
    os.setsid()
    error = _daemon(spec, directory, report)
    if error:
        os.write(report, error.encode())
    os._exit(0)


def _daemon(spec: dict[str, Any], directory: Path, report: int) -> str:
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log = _Log(Path(spec["log"]))
    signal.signal(signal.SIGUSR1, lambda *_: log.reopen())
    out, out_write = os.pipe()
    err, err_write = os.pipe()
    started, status = os.pipe()
    try:
        if spec["pid_namespace"]:
            linux.unshare(linux.CLONE_NEWPID)
    except StartError as e:
        return str(e)
    pid = os.fork()
    if pid == 0:
        _first_process(spec, directory, out_write, err_write, status)
    for handle in (out_write, err_write, status):
        os.close(handle)
    error = os.read(started, 65536).decode()  # empty once the program runs
    if error:
        os.waitpid(pid, 0)
        _finish(directory, 128, "StartError", error)
        return error
    own = os.getpid()
    facts = {"pid": pid, "pid_ticks": _start_ticks(pid), "shim": own, "shim_ticks": _start_ticks(own)}
    _write_json(directory / "started.json", facts | {"at": time.time_ns()})
    os.close(report)
    _pump(log, {out: "stdout", err: "stderr"}, pid)
    code = exit_code(os.waitpid(pid, 0)[1])
    _finish(directory, code, "Completed" if code == 0 else "Error", "")
    return ""


def _first_process(spec: dict[str, Any], directory: Path, stdout: int, stderr: int, status: int) -> NoReturn:
    """The container's first process; `status` gets the reason if its program can't be executed."""
    try:
        os.setsid()
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWUTS)
        if spec["hostname"]:
            linux.set_hostname(spec["hostname"])
        rootfs.make_root(spec, directory)
        null = os.open("/dev/null", os.O_RDONLY)
        for handle, number in ((null, 0), (stdout, 1), (stderr, 2)):
            os.dup2(handle, number)
        become(spec)
    except BaseException as e:  # noqa: BLE001  a forked child must never return into its parent's program
        os.write(status, (str(e) or repr(e)).encode())
    os._exit(128)


class _Log:
    """A log file in the CRI format."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.reopen()

    def reopen(self) -> None:
        """Open the path again, after a rotation."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)

    def write(self, stream: str, data: bytes, *, full: bool) -> None:
        """Append one line, or the part of one."""
        now = time.time_ns()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9))
        head = f"{stamp}.{now % 10**9:09d}Z {stream} {'F' if full else 'P'} "
        try:
            self._file.write(head.encode() + data + b"\n")
        except OSError:
            pass  # a full disk must not stop the container


def _pump(log: _Log, pipes: dict[int, str], pid: int) -> None:
    """Copy the output until both streams end; nothing of the container outlives its first process."""
    selector = selectors.DefaultSelector()
    rest = dict.fromkeys(pipes, b"")
    for handle in (*pipes, watch := os.pidfd_open(pid)):
        selector.register(handle, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            if key.fd == watch:
                # A PID namespace has died with its first process already; without one its session is ended here.
                selector.unregister(watch)
                try:
                    os.killpg(pid, signal.SIGKILL)
                except OSError:
                    pass
                continue
            chunk = os.read(key.fd, LONGEST_LINE)
            *lines, tail = (rest[key.fd] + chunk).split(b"\n")
            for line in lines:
                log.write(pipes[key.fd], line, full=True)
            if tail and (not chunk or len(tail) >= LONGEST_LINE):
                log.write(pipes[key.fd], tail, full=False)
                tail = b""
            rest[key.fd] = tail
            if not chunk:
                selector.unregister(key.fd)


def _finish(directory: Path, code: int, reason: str, message: str) -> None:
    try:
        value = {"code": code, "at": time.time_ns(), "reason": reason, "message": message}
        _write_json(directory / "exit.json", value)
    except FileNotFoundError:
        pass  # removed meanwhile


def _write_json(path: Path, value: dict[str, Any]) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(value))
    fresh.rename(path)


def _start_ticks(pid: int) -> int:
    """Start time of a process, to tell it from a later one with its number; 0 for one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0
