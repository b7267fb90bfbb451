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
from typing import IO

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.records import Record, from_header, to_header

MAGIC = b"EVLJ\x02"
OLDER = b"EVLJ\x01"
"""How a file of the format before this one begins; its records say less, and mean the same."""
_KIND = MAGIC[:-1]
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
    return frame(header, body)


def frame(header: bytes, body: bytes) -> bytes:
    """A header and a body in their frame. Raises ValueError if that is more than any reader would take."""
    payload = _LENGTH.pack(len(header)) + header + body
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a record of {len(payload)} bytes is above the limit of {MAX_PAYLOAD}")
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def read_frame(file: IO[bytes], offset: int, limit: int) -> bytes | None:
    """The frame at an offset with what it frames, or None if no whole and unbroken one lies there below `limit`."""
    file.seek(offset)
    start = file.read(_FRAME.size)
    if len(start) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(start)
    if not _SMALLEST_PAYLOAD <= length <= MAX_PAYLOAD or offset + _FRAME.size + length > limit:
        return None
    payload = file.read(length)
    return start + payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def split_frame(framed: bytes) -> tuple[bytes, bytes]:
    """Header and body of a frame that `read_frame` returned. Raises ValueError if it has no header."""
    (length,) = _LENGTH.unpack_from(framed, _FRAME.size)
    start = _FRAME.size + _LENGTH.size
    if start + length > len(framed):
        raise ValueError("the header is longer than the record")
    return framed[start : start + length], framed[start + length :]


def read_at(file: IO[bytes], offset: int, limit: int, name: str) -> Found | None:
    """The record at an offset, or None if no whole and unbroken one lies there below `limit`.

    Raises:
        JournalDamaged: the record is unbroken, but is none that this version understands.
    """
    framed = read_frame(file, offset, limit)
    if framed is None:
        return None
    try:
        header, body = split_frame(framed)
        ending = _HEADER_END.search(header, max(0, len(header) - _LONGEST_HEADER_END))
        if ending is None:
            raise ValueError(f"record header key {FLUSHED}: missing")
        record = from_header(header[: ending.start()] + b"}")
    except ValueError as error:
        raise JournalDamaged(f"{name}: the record at offset {offset} makes no sense: {error}") from error
    return Found(offset, offset + len(framed), record, int(ending[1]), body)


def read_file(file: IO[bytes], size: int, name: str) -> Iterator[Found]:
    """The records of an open file's first `size` bytes, up to a torn tail.

    Raises:
        JournalDamaged: names file and offset; a flushed record is broken.
    """
    offset = _begin(file, size, name)
    while 0 < offset < size:
        found = read_at(file, offset, size, name)
        if found is None:
            _refuse_damage(file, offset, size, name)
            return
        yield found
        offset = found.end


def good_length(file: IO[bytes], size: int, name: str) -> int:
    """How many of an open file's first `size` bytes come before its torn tail. Raises JournalDamaged."""
    offset = _begin(file, size, name)
    while 0 < offset < size:
        framed = read_frame(file, offset, size)
        if framed is None:
            _refuse_damage(file, offset, size, name)
            return offset
        offset += len(framed)
    return offset


def _begin(file: IO[bytes], size: int, name: str) -> int:
    """Where the first record begins; 0 if even the file's own header is torn."""
    file.seek(0)
    start = file.read(min(size, len(MAGIC)))
    if start in (MAGIC, OLDER):
        return len(MAGIC)
    if len(start) == len(MAGIC) and start.startswith(_KIND) and start[-1] > MAGIC[-1]:
        raise JournalDamaged(f"{name}: format {start[-1]} is newer than {MAGIC[-1]}, which this version reads")
    _refuse_damage(file, 0, size, name)
    return 0


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
