"""Incarnations: who owns a session's storage. A number is claimed by the exclusive creation of its file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import structlog
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from everloop_trainer.session.errors import Fenced, JournalDamaged
from everloop_trainer.session.status import Incarnation
from everloop_trainer.store import layout
from everloop_trainer.store.files import Files

_NAME = re.compile(r"(\d{8})\.json")
log = structlog.get_logger(__name__)


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class _EpochFile:
    format: Literal[1]
    number: int
    attempt: int
    boot: int
    podUID: str  # noqa: N815 - the key in the file
    time: str


_EPOCH = TypeAdapter(_EpochFile)


def next_incarnation(newest: Incarnation | None, attempt: int, pod_uid: str) -> Incarnation:
    """The incarnation that a server of this attempt and pod may claim. Pure.

    Raises:
        Fenced: a greater attempt, or the same attempt in another pod, has claimed the storage.
    """
    if newest is None:
        return Incarnation(number=1, attempt=attempt, boot=1, pod_uid=pod_uid)
    if attempt > newest.attempt:
        return Incarnation(newest.number + 1, attempt, 1, pod_uid)
    if attempt == newest.attempt and pod_uid == newest.pod_uid:
        return Incarnation(newest.number + 1, attempt, newest.boot + 1, pod_uid)
    raise Fenced(
        f"attempt {attempt} of pod {pod_uid} is superseded by incarnation {newest.number}: "
        f"attempt {newest.attempt} of pod {newest.pod_uid}"
    )


def newest_epoch(files: Files) -> Incarnation | None:
    """The incarnation with the greatest number, or None in new storage. Raises JournalDamaged, OSError."""
    numbers = [int(match[1]) for name in files.list(layout.EPOCHS) if (match := _NAME.fullmatch(name))]
    if not numbers:
        return None
    path = layout.epoch(max(numbers))
    with files.open_read(path) as file:
        content = file.read()
    try:
        epoch = _EPOCH.validate_json(content, strict=True)
    except ValidationError as error:
        raise JournalDamaged(f"{path}: {error.errors()[0]['msg']}") from error
    return Incarnation(epoch.number, epoch.attempt, epoch.boot, epoch.podUID)


def claim(files: Files, attempt: int, pod_uid: str, time: str) -> tuple[Incarnation, Incarnation | None]:
    """Claim the next incarnation; returns it and its predecessor. `time` is RFC 3339.

    Raises:
        Fenced: see `next_incarnation`. A race that is lost to another claimant is judged anew against the winner.
        OSError: the storage failed.
    """
    while True:
        newest = newest_epoch(files)
        mine = next_incarnation(newest, attempt, pod_uid)
        content = _EPOCH.dump_json(_EpochFile(1, mine.number, mine.attempt, mine.boot, mine.pod_uid, time))
        try:
            files.create(layout.epoch(mine.number), content)
        except FileExistsError:
            log.warning("incarnation claimed by another server first", number=mine.number)
            continue
        log.info("incarnation claimed", number=mine.number, attempt=attempt, boot=mine.boot, pod_uid=pod_uid)
        return mine, newest


def read_fence(files: Files, number: int) -> None:
    """Return if incarnation `number` is still the newest. Raises Fenced, OSError."""
    if files.exists(layout.epoch(number + 1)):
        raise Fenced(f"incarnation {number} is superseded by incarnation {number + 1}")
