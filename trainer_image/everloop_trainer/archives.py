"""A stored adapter as a tar file that is nowhere stored: each range of it is made when it is read.

For older versions of the SDK, which download a checkpoint as one archive. Of a training checkpoint it has the weights
without the optimizer. A state file never changes, so the archive of one is the same whenever it is made.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everloop_trainer import peftfiles
from everloop_trainer.about import About

NAME = "checkpoint.tar"
COMPLETE = "checkpoint_complete"
"""An empty file by which the SDK tells that nothing is missing."""
GROUP = "weights/"
"""What the names of weights begin with in a state file that holds more."""
BLOCK = 512
READ_BYTES = 256 * 1024


class NoAdapter(ValueError):
    """A file is no state file."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes in memory, or `size` bytes of a file from `start` on."""

    size: int
    content: bytes = b""
    path: Path | None = None
    start: int = 0

    @classmethod
    def of(cls, content: bytes) -> Part:
        """These bytes."""
        return cls(len(content), content)


def archive(state: Path, about: About) -> list[Part]:
    """The archive of a state file, as parts one behind the other. Raises NoAdapter, OSError."""
    found = peftfiles.read_header(state)
    if found is None:
        raise NoAdapter(f"{state}: is no state file")
    header, data = found
    metadata = header.pop("__metadata__", {})
    plain = metadata.get("format") == peftfiles.WEIGHTS_FORMAT
    kept = header if plain else {name: entry for name, entry in header.items() if name.startswith(GROUP)}
    spans = [entry["data_offsets"] for entry in kept.values()]
    if not spans:
        raise NoAdapter(f"{state}: holds no weights")
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    if end - start != sum(last - first for first, last in spans):
        raise NoAdapter(f"{state}: its weights lie apart")
    table: dict[str, Any] = {"__metadata__": {**metadata, "format": peftfiles.WEIGHTS_FORMAT}}
    for name, entry in kept.items():
        first, last = entry["data_offsets"]
        table[name if plain else name.removeprefix(GROUP)] = {**entry, "data_offsets": [first - start, last - start]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beside = peftfiles.companions(about, table.keys() - {"__metadata__"}, metadata)
    members = {
        peftfiles.CONFIG: [Part.of(beside[peftfiles.CONFIG])],
        peftfiles.WEIGHTS: [
            Part.of(len(text).to_bytes(8, "little") + text),
            Part(end - start, path=state, start=data + start),
        ],
        peftfiles.CARD: [Part.of(beside[peftfiles.CARD])],
        COMPLETE: [],
    }
    parts = [part for name, content in members.items() for part in _member(name, content)]
    return [*parts, Part.of(bytes(2 * BLOCK))]


def size(parts: Sequence[Part]) -> int:
    """Bytes of it all."""
    return sum(part.size for part in parts)


def read(parts: Sequence[Part], start: int, end: int) -> Iterator[bytes]:
    """The bytes from `start` up to but not including `end`. Raises OSError, EOFError if a file has become shorter."""
    at = 0
    for part in parts:
        first, last = max(start - at, 0), min(end - at, part.size)
        at += part.size
        if first >= last:
            continue
        if part.path is None:
            yield part.content[first:last]
            continue
        with part.path.open("rb") as file:
            file.seek(part.start + first)
            while first < last:
                content = file.read(min(READ_BYTES, last - first))
                if not content:
                    raise EOFError(f"{part.path}: ends too early")
                first += len(content)
                yield content


def _member(name: str, content: list[Part]) -> list[Part]:
    entry = tarfile.TarInfo(name)
    entry.size = size(content)
    return [
        Part.of(entry.tobuf(tarfile.GNU_FORMAT)),
        *content,
        Part.of(bytes(-entry.size % BLOCK)),
    ]
