"""A source for tests of the lock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from everloop_trainer.fetching.files import SourceFile


class Slow:
    """A source that counts how often it is asked, and takes its time."""

    title = "slow"

    def __init__(self, asked: Path) -> None:
        self.asked = asked

    def files(self) -> tuple[str, Sequence[SourceFile]]:
        with self.asked.open("a") as file:
            file.write("x")
        return "", [SourceFile("config.json", 2, "size")]

    def fetch(self, file: SourceFile, directory: Path) -> None:
        time.sleep(0.5)
        (directory / file.name).write_bytes(b"{}")
