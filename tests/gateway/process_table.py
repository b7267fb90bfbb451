"""Processes that a test has not started itself."""

from __future__ import annotations

from pathlib import Path


def process_of(executable: Path) -> int:
    """The process that was started by this path."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if command.split(b"\0")[0] == str(executable).encode():
                return int(entry.name)
    raise AssertionError(f"no process {executable}")
