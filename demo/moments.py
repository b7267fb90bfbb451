"""Finds the moment for a kill: when an operation was accepted and has no result yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Running:
    """An operation that the journal shows as started and unfinished."""

    stream: str
    number: int
    kind: str
    engine: int
    """Process id of the engine that runs it, as the container's PID namespace numbers it."""


def running(records: Iterable[Mapping[str, Any]]) -> Running | None:
    """The operation that is being run at the end of ``records`` (a journal dump), if any."""
    kinds: dict[tuple[str, int], str] = {}
    current: Running | None = None
    for record in records:
        key = (record.get("s", ""), record.get("n", -1))
        match record["t"]:
            case "accept":
                kinds[key] = record["k"]
            case "try" if key in kinds:  # of others only a base tells that they were accepted
                current = Running(*key, kinds[key], record["engine"])
            case "result" if current is not None and key == (current.stream, current.number):
                current = None
            case "open" if not record["segment"]:  # a new incarnation, not another file of the same one
                current = None
    return current
