"""The file of a base: records that are read singly, then the facts. It counts once a journal file names its hash.

A file is a header and frames as in `segments`: first copies of records as they stood in the journal, then the facts of
the session, then those of each stream with the list of the results that it owes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from everloop_trainer.session.base import (
    Base,
    SessionFacts,
    StreamFacts,
    pack_owed,
    session_from_json,
    stream_from_json,
    to_json,
    unpack_owed,
)
from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.records import BaseSeal, Record
from everloop_trainer.session.streams import Owed
from everloop_trainer.store.files import COPY_BYTES, Files
from everloop_trainer.store.layout import Cut, base
from everloop_trainer.store.places import base_path
from everloop_trainer.store.segments import frame, read_at, read_frame, split_frame

MAGIC = b"EVLB\x01"


class BaseWriter:
    """Writes one base to a new file: records, facts, then `finish`. Raises OSError."""

    def __init__(self, files: Files, before: Cut) -> None:
        self._files = files
        self._before = before
        self._path = base(before)
        self._file = files.open_append(self._path)
        self._digest = hashlib.sha256()
        self._waiting = bytearray(MAGIC)
        self._length = len(MAGIC)
        self._facts = 0

    def copy(self, framed: bytes) -> int:
        """Add a record in its frame; returns where in the file it lies."""
        offset = self._length
        self._write(framed)
        return offset

    def facts(self, facts: SessionFacts | StreamFacts, owed: Owed | None = None) -> None:
        """Add facts: the session's first, then each stream's with what it owes."""
        if not self._facts:
            self._facts = self._length
        self._write(frame(to_json(facts), b"" if owed is None else pack_owed(owed)))

    def _write(self, data: bytes) -> None:
        self._waiting += data
        self._length += len(data)
        if len(self._waiting) >= COPY_BYTES:
            self._pass_on()

    def _pass_on(self) -> None:
        data, self._waiting = bytes(self._waiting), bytearray()
        self._digest.update(data)
        self._file.append(data)

    def finish(self) -> BaseSeal:
        """Make the file durable, read it again, and return its seal. Raises JournalDamaged if it reads otherwise."""
        self._pass_on()
        self._file.flush()
        sealed = BaseSeal(*self._before, self._length, self._digest.hexdigest(), self._facts)
        check_base(self._files, sealed)
        return sealed

    def close(self) -> None:
        """Give the handle back."""
        self._file.close()


def check_base(files: Files, sealed: BaseSeal) -> None:
    """Return if the file of a base is the one that was sealed. Raises JournalDamaged, OSError."""
    path = base_path(sealed)
    if not files.exists(path) or files.sha256(path) != (sealed.sha256, sealed.length):
        raise JournalDamaged(f"{path}: it is not the base of {sealed.length} bytes that was sealed")


def read_base(files: Files, sealed: BaseSeal) -> Base:
    """The base of a seal, whose file is checked as a whole. Raises JournalDamaged, OSError."""
    path = base_path(sealed)
    check_base(files, sealed)
    frames = _frames(files, sealed, path)
    try:
        facts = session_from_json(next(frames)[0])
        streams: list[StreamFacts] = []
        owed: dict[str, Owed] = {}
        for header, body in frames:
            stream = stream_from_json(header)
            streams.append(stream)
            owed[stream.name] = unpack_owed(path, body)
    except (ValueError, StopIteration) as error:
        raise JournalDamaged(f"{path}: its facts make no sense: {error}") from error
    return Base(facts, tuple(streams), owed)


def _frames(files: Files, sealed: BaseSeal, path: str) -> Iterator[tuple[bytes, bytes]]:
    offset = sealed.facts
    with files.open_read(path) as file:
        while offset < sealed.length:
            framed = read_frame(file, offset, sealed.length)
            if framed is None:
                raise ValueError(f"the frame at offset {offset} is broken")
            yield split_frame(framed)
            offset += len(framed)


def read_kept(files: Files, path: str, offset: int) -> tuple[Record, bytes]:
    """A single record of a base, and its body. Raises JournalDamaged, OSError."""
    with files.open_read(path) as file:
        found = read_at(file, offset, file.seek(0, 2), path)
    if found is None or found.body is None:
        raise JournalDamaged(f"{path}: the record at offset {offset} is broken")
    return found.record, found.body
