"""What the processes of session pods logged: JSON objects, one a line, with the time of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One line; `name` is what happened, `fields` are all of its values."""

    time: datetime
    name: str
    fields: dict[str, Any]


def events(files: Iterable[Path], since: datetime) -> list[Event]:
    """Everything logged after a moment, in order. A container runtime's prefix before the object is skipped."""
    found = [event for path in files for event in _events(path) if event.time > since]
    return sorted(found, key=lambda event: event.time)


def _events(path: Path) -> Iterator[Event]:
    for line in path.read_text(errors="replace").splitlines():
        start = line.find("{")
        try:
            fields = json.loads(line[start:]) if start >= 0 else None
        except ValueError:  # a library's own words, or a line that is being written
            continue
        if isinstance(fields, dict) and "event" in fields and "timestamp" in fields:
            yield Event(datetime.fromisoformat(fields["timestamp"]), str(fields["event"]), fields)
