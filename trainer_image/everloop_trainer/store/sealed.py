"""The sealed history: which bytes of which files count, and the records in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import structlog

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.numbers import Range
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Open, Record, Seal
from everloop_trainer.store import layout
from everloop_trainer.store.files import COPY_BYTES, Files
from everloop_trainer.store.layout import Cut
from everloop_trainer.store.places import Lineage, Place
from everloop_trainer.store.segments import MAGIC, good_length, read_at, read_file, read_first

EMPTY = hashlib.sha256().hexdigest()
FIRST = Cut(1, 0)
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """One record that counts; no body where that is damaged."""

    position: Position
    record: Record
    body: bytes | None


def seal(files: Files, newest: int, *, claimed: bool = False) -> Lineage:
    """What counts of the journals of incarnations up to `newest`. A claimant makes durable what it counts.

    The newest journal file that has an `open` record rules: it says for ever which base counts, and how much of the
    files between that and itself. It has no seal itself yet; its records count up to its torn tail. Files behind it
    never got as far as being opened. The base is named here and checked by whoever reads it.

    A record whose body is damaged and whose header is not still counts: what happened is known, and the one operation
    that the body belongs to is stopped by whoever reads it.

    Raises:
        JournalDamaged: names file and offset, or the seal that does not fit its file.
    """
    found = _ruling_file(files, newest)
    if found is None:
        return Lineage(None, tuple(Seal(number, 0, EMPTY) for number in range(1, newest + 1)))
    ruler, opened = found
    first = FIRST if opened.base is None else Cut(opened.base.incarnation, opened.base.segment)
    if not _without_gap([first, *(Cut(older.incarnation, older.segment) for older in opened.seals), ruler]):
        raise JournalDamaged(f"{layout.journal(*ruler)}: its seals are not those of the files from {first} to itself")
    for older in opened.seals:
        _check_seal(files, older, claimed=claimed)
    unopened = (Seal(number, 0, EMPTY) for number in range(ruler.incarnation + 1, newest + 1))
    return Lineage(opened.base, (*opened.seals, _seal_tail(files, ruler, claimed=claimed), *unopened))


def _without_gap(files: list[Cut]) -> bool:
    """Whether what comes after the first place begins there, and each is the file behind the one before it."""
    return files[0] == files[1] and all(
        here in (Cut(before.incarnation, before.segment + 1), Cut(before.incarnation + 1, 0))
        for before, here in pairwise(files[1:])
    )


def records(files: Files, lineage: Lineage) -> Iterator[HistoryRecord]:
    """Every record behind the base that counts, in order. Raises JournalDamaged, OSError."""
    start, incarnation = 0, 0
    for sealed in lineage.seals:
        if sealed.length == 0:
            continue
        path = layout.journal(sealed.incarnation, sealed.segment)
        if sealed.incarnation != incarnation:
            start, incarnation = 0, sealed.incarnation
        with files.open_read(path) as file:
            for found in read_file(file, sealed.length, path):
                if found.offset == len(MAGIC) and isinstance(found.record, Open):
                    start = found.record.start
                yield HistoryRecord(Position(incarnation, start + found.offset), found.record, found.body)


def _ruling_file(files: Files, newest: int) -> tuple[Cut, Open] | None:
    known = [
        parsed[0] for name in files.list(layout.JOURNAL) if (parsed := layout.journal_file(name)) and not parsed[1]
    ]
    for here in sorted((each for each in known if each.incarnation <= newest), reverse=True):
        path = layout.journal(*here)
        with files.open_read(path) as file:
            size = file.seek(0, 2)
            first = read_first(file, size, path)
        if first is None:
            continue
        opened = first.record
        if not isinstance(opened, Open) or (opened.number, opened.segment) != here:
            raise JournalDamaged(f"{path}: its first record does not open journal {here.incarnation}")
        return here, opened
    return None


def _seal_tail(files: Files, ruler: Cut, *, claimed: bool) -> Seal:
    path = layout.journal(*ruler)
    with files.open_read(path) as file:
        size = file.seek(0, 2)
        if claimed:
            # What is read may be in memory only, left by a process that was killed: count it, but let it not vanish.
            files.sync(path)
        length, damaged = good_length(file, size, path)
    if claimed and length < size:
        log.warning("torn tail of a journal dropped", journal=path, offset=length, bytes=size - length)
    if claimed and damaged:
        _tell_damage(path, damaged)
    return Seal(ruler.incarnation, length, _hash(files, path, length, damaged), ruler.segment, damaged)


def _check_seal(files: Files, sealed: Seal, *, claimed: bool) -> None:
    """Return if a sealed file is what it was, or differs in the bodies of records only."""
    if sealed.length == 0:
        return
    path = layout.journal(sealed.incarnation, sealed.segment)
    if not files.exists(path):
        raise JournalDamaged(f"{path}: the file was sealed with {sealed.length} bytes and is not there")
    if _hash(files, path, sealed.length, sealed.damaged) == sealed.sha256:
        return
    with files.open_read(path) as file:
        places = [(each.offset, each.end) for each in read_file(file, sealed.length, path) if each.body is None]
    damaged = [place for place in places if place not in sealed.damaged]
    if not damaged:
        raise JournalDamaged(f"{path}: its first {sealed.length} bytes are not those that were sealed")
    if claimed:
        _tell_damage(path, damaged)


def _tell_damage(path: str, damaged: Sequence[Range]) -> None:
    log.error("bodies of records are damaged", journal=path, offsets=[offset for offset, _ in damaged])


def _hash(files: Files, path: str, length: int, left_out: Sequence[Range]) -> str:
    """The hash of a file's first bytes, without some ranges of them."""
    digest = hashlib.sha256()
    starts, ends = [0, *(end for _, end in left_out)], [*(start for start, _ in left_out), length]
    with files.open_read(path) as file:
        for start, end in zip(starts, ends, strict=True):
            file.seek(start)
            left = end - start
            while left and (chunk := file.read(min(COPY_BYTES, left))):
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()


def read_body(files: Files, place: Place) -> bytes:
    """The body of the record at a place. Raises JournalDamaged, OSError."""
    with files.open_read(place.path) as file:
        found = read_at(file, place.offset, place.limit, place.path)
    if found is None or found.body is None:
        raise JournalDamaged(f"{place.path}: the record at offset {place.offset} is broken")
    return found.body
