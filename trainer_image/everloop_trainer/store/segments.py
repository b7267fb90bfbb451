"""The framing of a journal file, and where its good part ends. Works on bytes and open files.

A file is a header and records: `u32 LE length | u32 LE crc32 of payload | payload`, the payload being
`u32 LE header length | header JSON | body`. Every header also carries `f`: how many bytes of the file were known to be
flushed when the record was written. A crash may leave any part of what was not flushed, in any order; so a bad record
is a torn tail, unless a good record behind it says that this place had been flushed before: then it is damage.
"""

from __future__ import annotations

import json
import re
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
# `encode` puts the type first and the flushed length last.
_HEADER_START = b'{"t":"'
_HEADER_END = re.compile(rb',"f":(\d{1,19})\}\Z')
_LONGEST_HEADER_END = 32


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
    """Raise JournalDamaged if a record behind `bad` says that `bad` had been flushed before it was written.

    A torn record may be large, and its body is whatever a client sent: only what begins and ends as a header does is
    looked at, and nothing can have been flushed behind its own place.
    """
    file.seek(bad)
    tail = file.read(size - bad)
    found = -1
    while (found := tail.find(_HEADER_START, found + 1)) != -1:
        start = found - _LENGTH.size - _FRAME.size
        if start < 1:
            continue
        length, checksum = _FRAME.unpack_from(tail, start)
        (header_length,) = _LENGTH.unpack_from(tail, start + _FRAME.size)
        end = start + _FRAME.size + length
        header_end = found + header_length
        if length > MAX_PAYLOAD or header_end > end or end > len(tail):
            continue
        ending = _HEADER_END.search(tail, max(found, header_end - _LONGEST_HEADER_END), header_end)
        if ending is None or not bad < int(ending[1]) <= bad + start:
            continue
        if zlib.crc32(memoryview(tail)[start + _FRAME.size : end]) == checksum:
            raise JournalDamaged(
                f"{name}: damaged at offset {bad}: the record at offset {bad + start} was written when "
                f"{int(ending[1])} bytes had been flushed"
            )
