"""How far a fetch is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """Files of `total` bytes that gather in a directory."""

    directory: Path
    total: int

    @property
    def bytes(self) -> int:
        """What has come, by earlier tries too; what the hub's client keeps of files that are not whole yet counts."""
        come = 0
        for path in self.directory.rglob("*"):
            try:
                come += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue  # it has just got its name
        return min(come, self.total)

    @property
    def percent(self) -> int:
        """The same in whole percents."""
        return 100 * self.bytes // self.total if self.total else 100
