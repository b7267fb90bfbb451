"""Long steps that say what they do, how far they are and for how long, and print what went wrong when they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bootstrap.layout import BootstrapError

_LOG_TAIL_LINES = 25
_TERMINAL_PERIOD = 1.0
_PLAIN_PERIOD = 20.0


def clock(seconds: float) -> str:
    """Write a duration as minutes and seconds: `1:05`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def size(count: float) -> str:
    """Write a number of bytes for people: `1.2 GB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


class Progress:
    """The steps of one run. Silent until the first step that has something to do."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.started = time.monotonic()
        self.worked = False

    @contextmanager
    def step(self, what: str) -> Iterator[Path]:
        """Announce a step, count its time and the disk that it fills, and yield the log file for its commands."""
        logs = self.cache / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / ("".join(letter if letter.isalnum() else "-" for letter in what.split(":")[0].lower()) + ".log")
        log.write_bytes(b"")
        if not self.worked:
            print(f"everloop: preparing {self.cache} (first time only)", flush=True)
        self.worked = True
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(what, log, done), daemon=True)
        begin = time.monotonic()
        print(f"  {what} ...", flush=True)
        ticker.start()
        try:
            yield log
        finally:
            done.set()
            ticker.join()
        _line(f"  {what}: done in {clock(time.monotonic() - begin)}", final=True)

    def _tick(self, what: str, log: Path, done: threading.Event) -> None:
        begin, free = time.monotonic(), _free(self.cache)
        period = _TERMINAL_PERIOD if sys.stdout.isatty() else _PLAIN_PERIOD
        while not done.wait(period):
            filled = max(0, free - _free(self.cache))
            _line(f"  {what}: {clock(time.monotonic() - begin)}, {size(filled)} on disk | {_last_line(log)}")

    def finish(self) -> None:
        """Say that all is there, if anything had to be made."""
        if self.worked:
            print(f"everloop: ready after {clock(time.monotonic() - self.started)}", flush=True)


def run(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> None:
    """Run `command` with its output in `log`.

    Raises:
        BootstrapError: it failed; the message ends with the last lines that it printed.
    """
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        code = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            check=False,
        ).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        raise BootstrapError(f"{command[0]} ended with status {code}; the end of {log}:\n{tail}")


def _free(path: Path) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-400:].decode(errors="replace").split("\n")
    return next((line.strip()[-60:] for line in reversed(lines) if line.strip()), "")


def _line(text: str, *, final: bool = False) -> None:
    if sys.stdout.isatty():
        width = os.get_terminal_size().columns
        print(f"\r\x1b[K{text[: width - 1]}", end="\n" if final else "", flush=True)
    else:
        print(text, flush=True)
