"""The framing of a journal file, and where its good part ends. Works on bytes and open files.

A file is a header and records: `u32 LE length | u32 LE crc32 of payload | payload`, the payload being
`u32 LE header length | header JSON | body`. Every header also carries `f`: how many bytes of the file were known to be
flushed when the record was written. A crash may leave any part of what was not flushed, in any order; so a bad record
is a torn tail, unless a good record behind it says that this place had been flushed before: then it is damage.

The last key of a header is `c`, a checksum of the header itself and of both lengths. Where that holds, damage lies in
the body alone: what the record was, and of which operation, is known, and so is where the next one begins.
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
from everloop_trainer.session.numbers import Range
from everloop_trainer.session.records import Record, from_header, to_header

MAGIC = b"EVLJ\x03"
OLDER = (b"EVLJ\x01", b"EVLJ\x02")
"""How files of the formats before this one begin: the first one's records say less, and no header carries `c`."""
_KIND = MAGIC[:-1]
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")
MAX_PAYLOAD = 1 << 30
_SMALLEST_PAYLOAD = _LENGTH.size + len(b"{}")
FLUSHED = "f"
# `encode` puts the type first, and last the flushed length and the checksum.
_HEADER_START = b'{"t":"'
_CHECK = b',"c":"%08x"}'
_HEADER_END = re.compile(rb',"f":(\d{1,19})(?:,"c":"([0-9a-f]{8})")?\}\Z')
_LONGEST_HEADER_END = 48
_WHOSE = "it cannot be told whose record that was, or what it acknowledged"


@dataclass(frozen=True, slots=True)
class Found:
    """A record of a file: its offset, the offset behind it, and its content; no body where that is damaged."""

    offset: int
    end: int
    record: Record
    body: bytes | None


def encode(record: Record, body: bytes, flushed: int) -> bytes:
    """The bytes of one record. Raises ValueError for a body that no reader would take."""
    header = json.dumps(to_header(record) | {FLUSHED: flushed}, separators=(",", ":")).encode()
    bare = header[:-1]
    header_length = len(bare) + len(_CHECK % 0)
    length = _payload_length(header_length, len(body))
    return frame(bare + _CHECK % _header_checksum(length, header_length, bare), body)


def frame(header: bytes, body: bytes) -> bytes:
    """A header and a body in their frame. Raises ValueError if that is more than any reader would take."""
    length = _payload_length(len(header), len(body))
    payload = _LENGTH.pack(len(header)) + header + body
    return _FRAME.pack(length, zlib.crc32(payload)) + payload


def _payload_length(header: int, body: int) -> int:
    length = _LENGTH.size + header + body
    if length > MAX_PAYLOAD:
        raise ValueError(f"a record of {length} bytes is above the limit of {MAX_PAYLOAD}")
    return length


def _header_checksum(length: int, header_length: int, bare: bytes) -> int:
    return zlib.crc32(bare, zlib.crc32(_LENGTHS.pack(length, header_length)))


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
        return Found(offset, offset + len(framed), _record(header), body)
    except ValueError as error:
        raise _senseless(name, offset, error) from error


def _read_header(file: IO[bytes], offset: int, limit: int, name: str) -> Found | None:
    """The record at an offset without its body, or None if it cannot be told what lies there below `limit`.

    Raises:
        JournalDamaged: the header is unbroken, but is none that this version understands.
    """
    file.seek(offset)
    start = file.read(_FRAME.size + _LENGTH.size)
    if len(start) < _FRAME.size + _LENGTH.size:
        return None
    length, _ = _FRAME.unpack_from(start)
    (header_length,) = _LENGTH.unpack_from(start, _FRAME.size)
    end = offset + _FRAME.size + length
    if length > MAX_PAYLOAD or end > limit or _LENGTH.size + header_length > length:
        return None
    header = file.read(header_length)
    ending = _ending(header)
    if ending is None or ending[2] is None:
        return None
    if int(ending[2], 16) != _header_checksum(length, header_length, header[: -len(_CHECK % 0)]):
        return None
    try:
        return Found(offset, end, _record(header), None)
    except ValueError as error:
        raise _senseless(name, offset, error) from error


def _ending(header: bytes) -> re.Match[bytes] | None:
    return _HEADER_END.search(header, max(0, len(header) - _LONGEST_HEADER_END))


def _record(header: bytes) -> Record:
    ending = _ending(header)
    if ending is None:
        raise ValueError(f"record header key {FLUSHED}: missing")
    return from_header(header[: ending.start()] + b"}")


def _senseless(name: str, offset: int, error: ValueError) -> JournalDamaged:
    return JournalDamaged(f"{name}: the record at offset {offset} makes no sense: {error}")


def read_file(file: IO[bytes], size: int, name: str) -> Iterator[Found]:
    """The records of an open file's first `size` bytes, all of which count.

    Raises:
        JournalDamaged: names file and offset; a record is broken so that it cannot be told what it was.
    """
    offset = _begin(file, size, name)
    if offset == 0 < size:
        raise JournalDamaged(f"{name}: damaged at offset 0 of {size} bytes that count: it does not begin as a journal")
    while offset < size:
        found = read_at(file, offset, size, name) or _read_header(file, offset, size, name)
        if found is None:
            raise JournalDamaged(f"{name}: damaged at offset {offset} of {size} bytes that count; {_WHOSE}")
        yield found
        offset = found.end


def read_first(file: IO[bytes], size: int, name: str) -> Found | None:
    """The first record of a file that nobody has sealed; None if it is torn. Raises JournalDamaged."""
    offset = _begin(file, size, name)
    return _read_unsealed(file, offset, size, name) if 0 < offset < size else None


def good_length(file: IO[bytes], size: int, name: str) -> tuple[int, tuple[Range, ...]]:
    """How many of an open file's first `size` bytes come before its torn tail, and where bodies in them are damaged.

    Those places are given as the ranges of their records. Raises JournalDamaged as `read_file` does.
    """
    offset = _begin(file, size, name)
    damaged: list[Range] = []
    while 0 < offset < size:
        framed = read_frame(file, offset, size)
        if framed is not None:
            offset += len(framed)
            continue
        found = _read_unsealed(file, offset, size, name)
        if found is None:
            break
        damaged.append((offset, found.end))
        offset = found.end
    return offset, tuple(damaged)


def _begin(file: IO[bytes], size: int, name: str) -> int:
    """Where the first record begins; 0 if even the file's own header is torn."""
    file.seek(0)
    start = file.read(min(size, len(MAGIC)))
    if start in (MAGIC, *OLDER):
        return len(MAGIC)
    if len(start) == len(MAGIC) and start.startswith(_KIND) and start[-1] > MAGIC[-1]:
        raise JournalDamaged(f"{name}: format {start[-1]} is newer than {MAGIC[-1]}, which this version reads")
    witness = _witness(file, 0, size)
    if witness is not None:
        raise JournalDamaged(f"{name}: damaged at offset 0: {witness}")
    return 0


def _read_unsealed(file: IO[bytes], offset: int, size: int, name: str) -> Found | None:
    """The record at an offset, without its body if that is damaged; None where a torn tail begins.

    Raises:
        JournalDamaged: it had been flushed, and it cannot be told what it was.
    """
    found = read_at(file, offset, size, name)
    if found is not None:
        return found
    witness = _witness(file, offset, size)
    if witness is None:
        return None
    found = _read_header(file, offset, size, name)
    if found is None:
        raise JournalDamaged(f"{name}: damaged at offset {offset}: {witness}; {_WHOSE}")
    return found


def _witness(file: IO[bytes], bad: int, size: int) -> str | None:
    """Which record behind `bad` says that `bad` had been flushed before it was written; None if none does.

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
            return f"the record at offset {bad + start} was written when {int(ending[1])} bytes had been flushed"
    return None
