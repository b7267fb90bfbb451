"""The sealed history: which bytes of which journals count, and the records in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from everloop_trainer.session.errors import JournalDamaged
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Open, Record, Seal
from everloop_trainer.store import layout
from everloop_trainer.store.files import COPY_BYTES, Files
from everloop_trainer.store.segments import MAGIC, good_start, read_at, read_file

EMPTY = hashlib.sha256().hexdigest()
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """One record that counts."""

    position: Position
    record: Record
    body: bytes


def seal(files: Files, newest: int, *, claimed: bool = False) -> tuple[Seal, ...]:
    """How much counts of each of the journals 1..newest. A claimant makes durable what it counts.

    The newest journal that has an `open` record rules: its seals say for ever what counts of those before it. It has
    no seal itself yet; its records count up to its torn tail. Journals behind it never got as far as being opened.

    Raises:
        JournalDamaged: names file and offset, or the seal that does not fit its file.
    """
    ruler, opened = _ruling_journal(files, newest)
    seals: list[Seal] = []
    if opened is not None:
        if [older.incarnation for older in opened.seals] != list(range(1, ruler)):
            raise JournalDamaged(f"{layout.journal(ruler)}: its seals are not those of journals 1 to {ruler - 1}")
        for older in opened.seals:
            _check_seal(files, older)
            seals.append(older)
        seals.append(_seal_tail(files, ruler, claimed=claimed))
    seals += [Seal(number, 0, EMPTY) for number in range(len(seals) + 1, newest + 1)]
    return tuple(seals)


def records(files: Files, seals: tuple[Seal, ...]) -> Iterator[HistoryRecord]:
    """Every record that counts, in order. Raises JournalDamaged, OSError."""
    for sealed in seals:
        if sealed.length == 0:
            continue
        path = layout.journal(sealed.incarnation)
        end = len(MAGIC)
        with files.open_read(path) as file:
            for found in read_file(file, sealed.length, path):
                yield HistoryRecord(Position(sealed.incarnation, found.offset), found.record, found.body)
                end = found.end
        if end != sealed.length:
            raise JournalDamaged(f"{path}: damaged at offset {end} of {sealed.length} sealed bytes")


def _ruling_journal(files: Files, newest: int) -> tuple[int, Open | None]:
    for number in range(newest, 0, -1):
        path = layout.journal(number)
        if not files.exists(path):
            continue
        with files.open_read(path) as file:
            size = file.seek(0, 2)
            first = next(read_file(file, size, path), None)
        if first is None:
            continue
        if not isinstance(first.record, Open) or first.record.number != number:
            raise JournalDamaged(f"{path}: its first record does not open journal {number}")
        return number, first.record
    return 0, None


def _seal_tail(files: Files, number: int, *, claimed: bool) -> Seal:
    path = layout.journal(number)
    with files.open_read(path) as file:
        size = file.seek(0, 2)
        if claimed:
            # What is read may be in memory only, left by a process that was killed: count it, but let it not vanish.
            files.sync(path)
        length = good_start(size)
        for found in read_file(file, size, path):
            length = found.end
    if claimed and length < size:
        log.warning("torn tail of a journal dropped", journal=path, offset=length, bytes=size - length)
    return Seal(number, length, _hash(files, path, length))


def _check_seal(files: Files, sealed: Seal) -> None:
    if sealed.length == 0:
        return
    path = layout.journal(sealed.incarnation)
    if not files.exists(path) or _hash(files, path, sealed.length) != sealed.sha256:
        raise JournalDamaged(f"{path}: its first {sealed.length} bytes are not those that were sealed")


def _hash(files: Files, path: str, length: int) -> str:
    digest = hashlib.sha256()
    left = length
    with files.open_read(path) as file:
        while left and (chunk := file.read(min(COPY_BYTES, left))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def read_body(files: Files, position: Position, limit: int) -> bytes:
    """The body of the record at a position of the first `limit` bytes. Raises JournalDamaged, OSError."""
    path = layout.journal(position.incarnation)
    with files.open_read(path) as file:
        found = read_at(file, position.offset, limit, path)
    if found is None:
        raise JournalDamaged(f"{path}: the record at offset {position.offset} is broken")
    return found.body
