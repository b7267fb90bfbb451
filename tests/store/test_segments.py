"""Framing: what a crash may leave is dropped, anything else that is broken is told with file and offset."""

from __future__ import annotations

import io
import json
import random
import struct
import time
import zlib

import pytest

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.records import Record, to_header
from everloop_trainer.store.segments import MAGIC, OLDER, encode, frame, good_length, read_file
from tests.store.records import accept


def written(count: int, *, flushed_each: bool) -> tuple[bytes, list[int]]:
    """A file of `count` records and their offsets; each flushed on its own, or all in one batch."""
    data, offsets = MAGIC, []
    for seq in range(count):
        offsets.append(len(data))
        data += encode(accept(seq), b"body %d" % seq, len(data) if flushed_each else 0)
    return data, offsets


def read(data: bytes) -> list[tuple[Record, bytes | None]]:
    """What a start reads of a file that nobody sealed."""
    length, _ = good_length(io.BytesIO(data), len(data), "journal/1.log")
    return [(found.record, found.body) for found in read_file(io.BytesIO(data), length, "journal/1.log")]


def test_records_come_back_as_written() -> None:
    """Header and body survive the round trip, in order."""
    data, _ = written(3, flushed_each=True)
    assert read(data) == [(accept(seq), b"body %d" % seq) for seq in range(3)]


def test_a_file_cut_anywhere_yields_its_whole_records() -> None:
    """Every length that a crash may leave gives the records that lie before it whole, and no error."""
    data, offsets = written(3, flushed_each=True)
    for length in range(len(data)):
        whole = sum(end <= length for end in [*offsets[1:], len(data)])
        assert len(read(data[:length])) == whole, length


@pytest.mark.parametrize("bit", [0x01, 0x20])
def test_damage_before_a_flushed_record_costs_a_body_or_is_loud(bit: int) -> None:
    """Wherever a bit is another: either the record is known and its body is not, or file and offset are named."""
    data, offsets = written(3, flushed_each=True)
    start, end = offsets[1], offsets[2]
    bodies = 0
    for at in range(start, end):
        broken = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        if start + 4 <= at < start + 8 or at >= end - len(b"body 1"):  # the checksum of the whole, or the body
            assert read(broken) == [(accept(0), b"body 0"), (accept(1), None), (accept(2), b"body 2")], at
            assert good_length(io.BytesIO(broken), len(data), "journal/1.log") == (len(data), ((start, end),))
            bodies += 1
        else:
            with pytest.raises(JournalDamaged, match=f"journal/1.log: damaged at offset {start}"):
                read(broken)
    assert bodies == 4 + len(b"body 1")


def test_a_torn_body_that_nobody_flushed_is_no_damage() -> None:
    """Though its header is whole: it was never acknowledged."""
    data, offsets = written(3, flushed_each=False)
    assert read(data[: offsets[2] - 3] + bytes(3) + data[offsets[2] :]) == [(accept(0), b"body 0")]


def test_a_hole_in_what_was_never_flushed_is_a_torn_tail() -> None:
    """Blocks of one unflushed batch reach the disk in any order: what lies behind the hole was never acknowledged."""
    data, offsets = written(3, flushed_each=False)
    hole = data[: offsets[1]] + bytes(16) + data[offsets[1] + 16 :]
    assert len(read(hole)) == 1


def test_a_large_torn_record_is_dropped_at_once() -> None:
    """A kill within the write of a request of many tokens costs the next incarnation no time to speak of."""
    tokens = random.Random(1)
    body = struct.pack("<1000000I", *(tokens.randrange(50_000) for _ in range(1_000_000)))
    data = MAGIC + encode(accept(0), b"", 0) + encode(accept(1), body * 4, 5)[:-100]
    started = time.monotonic()
    assert len(read(data)) == 1
    assert time.monotonic() - started < 2.0


def test_a_record_within_the_body_of_a_torn_one_is_no_damage() -> None:
    """What a client put into its request cannot make the journal look damaged."""
    data = MAGIC + encode(accept(0), b"", 0)
    inside = b"a" * 100 + encode(accept(7), b"", 10**9)
    assert len(read(data + encode(accept(1), inside + b"b" * 100, len(data))[:-10])) == 1


def test_a_damaged_file_header_is_loud() -> None:
    """The first bytes count as any others do."""
    data, _ = written(2, flushed_each=True)
    with pytest.raises(JournalDamaged, match="offset 0"):
        read(b"XXXX\x01" + data[5:])


def test_a_whole_record_of_an_unknown_type_is_loud() -> None:
    """What a newer version wrote is never skipped."""
    frame = encode(accept(0), b"", 0)
    payload = frame[8:].replace(b'"t":"accept"', b'"t":"accepX"')
    data = MAGIC + struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    with pytest.raises(JournalDamaged, match=r"journal/1.log: the record at offset 5 makes no sense.*key t"):
        read(data)


@pytest.mark.parametrize("start", OLDER)
def test_a_file_of_an_older_format_is_read_and_its_damage_is_loud(start: bytes) -> None:
    """Its headers have no checksum of their own."""
    data = start
    for seq in range(3):
        header = json.dumps(to_header(accept(seq)) | {"f": len(data)}, separators=(",", ":")).encode()
        data += frame(header, b"body %d" % seq)
    assert read(data) == [(accept(seq), b"body %d" % seq) for seq in range(3)]
    with pytest.raises(JournalDamaged, match=r"journal/1.log: damaged at offset \d+"):
        read(data.replace(b"body 1", b"bodY 1"))
