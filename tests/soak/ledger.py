"""What a journal says of how often each operation was done. Pure functions over its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any


def done_twice(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Operations that were accepted or finished more than once in a lineage, as ``stream:number``."""
    counts = Counter(
        (record["t"], record["s"], record["n"]) for record in records if record["t"] in ("accept", "result")
    )
    return sorted({f"{stream}:{number}" for (_, stream, number), count in counts.items() if count > 1})


def difference(broken: Sequence[str], unbroken: Sequence[str]) -> str:
    """The first line in which two ledgers differ, in words; empty if they are equal."""
    for number, (first, second) in enumerate(zip_longest(broken, unbroken, fillvalue="nothing"), 1):
        if first != second:
            return f"result {number}: {first} is not {second}"
    return ""
