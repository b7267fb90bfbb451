"""Runs the user's script in its own environment and reads what it prints."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STEP = re.compile(r"^step (\d+)/\d+ loss ([-\d.einfa]+)$")


@dataclass
class Loop:
    """A training loop in a process of its own: the SDK, the script, and two variables.

    ``lines`` yields what it prints while it runs; ``None`` on the queue is its end.
    """

    python: Path
    script: Path
    url: str
    key: str
    log: Path
    arguments: tuple[str, ...] = ()
    lines: queue.Queue[str | None] = field(default_factory=queue.Queue)
    process: subprocess.Popen[str] | None = None
    reader: threading.Thread | None = None

    def start(self) -> None:
        """Start it with the two exports of the README and nothing else of ours."""
        kept = {k: v for k, v in os.environ.items() if k in {"PATH", "HOME", "LANG", "TMPDIR"}}
        env = {**kept, "TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "PYTHONUNBUFFERED": "1"}
        env["PYTHONFAULTHANDLER"] = "1"  # a library that aborts says nothing by itself
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(self.python), str(self.script), *self.arguments],
                env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.log.parent,
            )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def follow(self) -> Iterator[str]:
        """Every line until the script ends.

        Raises:
            RuntimeError: it ended with an error; the message has the end of its stderr.
        """
        while (line := self.lines.get()) is not None:
            yield line
        assert self.process is not None
        if self.process.wait() != 0:
            raise RuntimeError(f"the training loop exited {self.process.returncode}:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """End it if it still runs, and let its pipes go."""
        if self.process is None or self.reader is None:
            return
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdin is not None
        self.process.stdin.close()


def loss_of(line: str) -> float | None:
    """The loss in a ``step i/n loss x`` line, or None for any other line."""
    match = STEP.match(line)
    return float(match.group(2)) if match else None
