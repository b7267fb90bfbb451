"""A wall clock that a test moves under real processes, by a library that the C compiler makes of `wall_clock.c`."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
DAY = 86400


class WallClock:
    """The clock of the processes that are started with its `environment`; their monotonic clocks stay as they are."""

    def __init__(self, directory: Path) -> None:
        library = directory / "wall_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
        self._shift = directory / "wall_clock.shift"
        self._shift.write_bytes(struct.pack("=q", 0))
        self.environment = {"LD_PRELOAD": str(library), "EVERLOOP_TEST_CLOCK": str(self._shift)}

    def jump(self, days: float) -> None:
        """Be so many days away from the true time from now on."""
        with self._shift.open("r+b", buffering=0) as file:
            file.write(struct.pack("=q", int(days * DAY)))
