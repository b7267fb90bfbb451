"""A program in a process of its own that does as much as it is told, and says how long that took: a training loop."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = Path(__file__).with_name("programs")


@dataclass(frozen=True, slots=True)
class Lap:
    """Some steps in a row: seconds for all of them, by the loop's own clock, and the loss of each."""

    seconds: float
    losses: tuple[float, ...]


class Driven:
    """A loop that stands still between two laps, so that the other one has the machine to itself.

    Args:
        command: interpreter, program and arguments.
        environment: all of its variables.
        log: where its standard error goes.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.told = self._read()
        """What it said once it was ready."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def lap(self, steps: int) -> Lap:
        """Make so many steps. Raises RuntimeError, with what the loop wrote, if it ends instead."""
        told = self.ask(steps)
        return Lap(told["seconds"], tuple(told["losses"]))

    def ask(self, number: int) -> dict[str, Any]:
        """What the program answers to a line with this number. Raises as `lap` does."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the loop ended:\n{self._log.read_text()[-4000:]}")
        told: dict[str, Any] = json.loads(line)
        return told
