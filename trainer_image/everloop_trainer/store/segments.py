"""The framing of a journal file, and where its good part ends. Works on bytes and open files.

A file is a header and records: `u32 LE length | u32 LE crc32 of payload | payload`, the payload being
`u32 LE header length | header JSON | body`. Every header also carries `f`: how many bytes of the file were known to be
flushed when the record was written. A crash may leave any part of what was not flushed, in any order; so a bad record
is a torn tail, unless a good record behind it says that this place had been flushed before: then it is damage.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.records import Record, from_header, to_header

MAGIC = b"EVLJ\x01"
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
MAX_PAYLOAD = 1 << 30
_SMALLEST_PAYLOAD = _LENGTH.size + len(b"{}")
FLUSHED = "f"


@dataclass(frozen=True, slots=True)
class Found:
    """A record of a file: its offset, the offset behind it, and its content."""

    offset: int
    end: int
    record: Record
    flushed: int
    body: bytes


def encode(record: Record, body: bytes, flushed: int) -> bytes:
    """The bytes of one record. Raises ValueError for a body that no reader would take."""
    header = json.dumps(to_header(record) | {FLUSHED: flushed}, separators=(",", ":")).encode()
    payload = _LENGTH.pack(len(header)) + header + body
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a record of {len(payload)} bytes is above the limit of {MAX_PAYLOAD}")
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def read_at(file: IO[bytes], offset: int, limit: int, name: str) -> Found | None:
    """The record at an offset, or None if no whole and unbroken one lies there below `limit`.

    Raises:
        JournalDamaged: the record is unbroken, but is none that this version understands.
    """
    file.seek(offset)
    frame = file.read(_FRAME.size)
    if len(frame) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(frame)
    end = offset + _FRAME.size + length
    if not _SMALLEST_PAYLOAD <= length <= MAX_PAYLOAD or end > limit:
        return None
    payload = file.read(length)
    if len(payload) < length or zlib.crc32(payload) != checksum:
        return None
    (header_length,) = _LENGTH.unpack_from(payload)
    body_start = _LENGTH.size + header_length
    try:
        header: dict[str, Any] = json.loads(payload[_LENGTH.size : body_start])
        flushed = int(header.pop(FLUSHED))
        record = from_header(json.dumps(header).encode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalDamaged(f"{name}: the record at offset {offset} makes no sense: {error}") from error
    return Found(offset, end, record, flushed, payload[body_start:])


def read_file(file: IO[bytes], size: int, name: str) -> Iterator[Found]:
    """The records of an open file's first `size` bytes, up to a torn tail.

    The generator's consumer learns the good length from the last record's `end` (or `good_start`).

    Raises:
        JournalDamaged: names file and offset; a flushed record is broken.
    """
    file.seek(0)
    if file.read(min(size, len(MAGIC))) != MAGIC[: min(size, len(MAGIC))]:
        _refuse_damage(file, 0, size, name)
        return
    offset = good_start(size)
    while 0 < offset < size:
        found = read_at(file, offset, size, name)
        if found is None:
            _refuse_damage(file, offset, size, name)
            return
        yield found
        offset = found.end


def good_start(size: int) -> int:
    """Where the first record of a file of `size` bytes begins; 0 if even the file's header is torn."""
    return len(MAGIC) if size >= len(MAGIC) else 0


def _refuse_damage(file: IO[bytes], bad: int, size: int, name: str) -> None:
    """Raise JournalDamaged if a record behind `bad` says that `bad` had been flushed before it was written."""
    file.seek(bad)
    tail = file.read(size - bad)
    for start in range(1, len(tail) - _FRAME.size - _SMALLEST_PAYLOAD + 1):
        length, checksum = _FRAME.unpack_from(tail, start)
        end = start + _FRAME.size + length
        if not _SMALLEST_PAYLOAD <= length <= MAX_PAYLOAD or end > len(tail):
            continue
        if zlib.crc32(memoryview(tail)[start + _FRAME.size : end]) != checksum:
            continue
        behind = read_at(file, bad + start, size, name)
        if behind is not None and behind.flushed > bad:
            raise JournalDamaged(
                f"{name}: damaged at offset {bad}: the record at offset {behind.offset} was written when "
                f"{behind.flushed} bytes had been flushed"
            )
