"""Taking over a session's storage: identity, claim, sealing of the history, first record."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from everloop_trainer.session.base import Base
from everloop_trainer.session.errors import JournalDamaged, StorageFailed, StorageMismatch
from everloop_trainer.session.ports import Journal, Position
from everloop_trainer.session.records import Open, Record
from everloop_trainer.session.rollback import RolledBack
from everloop_trainer.session.status import BaseModel, Incarnation
from everloop_trainer.store import layout
from everloop_trainer.store.bases import read_base
from everloop_trainer.store.compacting import LIMITS, Compactor, Limits
from everloop_trainer.store.epochs import claim
from everloop_trainer.store.files import Files
from everloop_trainer.store.journal import PROBE_INTERVAL, JournalWriter
from everloop_trainer.store.places import Lineage, places_of
from everloop_trainer.store.restored import read_restored
from everloop_trainer.store.sealed import records, seal
from everloop_trainer.store.states import StoredStates

STRICT = ConfigDict(extra="forbid")
log = structlog.get_logger(__name__)


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class _BaseFile:
    name: str
    revision: str
    manifestSHA256: str  # noqa: N815 - the key in the file


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class _IdentityFile:
    format: Literal[1]
    namespace: str
    name: str
    lineage: str
    baseModel: _BaseFile  # noqa: N815 - the key in the file


_IDENTITY = TypeAdapter(_IdentityFile)


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who wants to serve the session."""

    namespace: str
    name: str
    base_model: BaseModel
    attempt: int
    pod_uid: str


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """Storage that this process owns until a newer incarnation claims it.

    `history` is what follows `base`, and has no bodies. `restored` are the models of a storage that was lost before
    this one, as far as there are copies.
    """

    incarnation: Incarnation
    previous: Incarnation | None
    lineage: str
    journal: JournalWriter
    states: StoredStates
    compactor: Compactor
    base: Base | None
    history: list[tuple[Position, Record]]
    restored: tuple[RolledBack, ...]


async def open_store(
    files: Files,
    claimant: Claimant,
    time: str,
    *,
    probe_interval: float = PROBE_INTERVAL,
    limits: Limits = LIMITS,
    begun: Callable[[Journal], None] | None = None,
) -> OpenedStore:
    """Claim the storage, read and seal its history, and open a journal of our own. `time` is RFC 3339.

    `limits` says how much history may follow a base before a new one is due.
    `begun` is given the journal before its first record is written: on full storage that takes long, and it says why.

    Raises:
        Fenced: another pod owns the storage, or claimed it meanwhile.
        StorageMismatch: it holds another base model.
        JournalDamaged: names file and offset.
        StorageFailed: the storage failed.
    """
    try:
        identity = await asyncio.to_thread(adopt, files, claimant)
        incarnation, previous = await asyncio.to_thread(claim, files, claimant.attempt, claimant.pod_uid, time)
        lineage = await asyncio.to_thread(seal, files, incarnation.number - 1, claimed=True)
        base = await asyncio.to_thread(read_base, files, lineage.base) if lineage.base is not None else None
        history = await asyncio.to_thread(_read, files, lineage)
        restored = await asyncio.to_thread(read_restored, files)
    except OSError as error:
        raise StorageFailed(str(error)) from error
    for sealed in lineage.seals:
        log.info("predecessor sealed", incarnation=sealed.incarnation, segment=sealed.segment, length=sealed.length)
    opening = Open(
        incarnation.number,
        incarnation.attempt,
        incarnation.boot,
        incarnation.pod_uid,
        lineage.seals,
        time,
        base=lineage.base,
    )
    journal = JournalWriter(files, opening, places_of(lineage, base), probe_interval=probe_interval)
    if begun is not None:
        begun(journal)
    try:
        await asyncio.shield(journal.append(opening)[1])
    except BaseException:
        await journal.close()
        raise
    compactor = Compactor(files, journal, limits, records=len(history))
    states = StoredStates(files, journal)
    return OpenedStore(incarnation, previous, identity, journal, states, compactor, base, history, restored)


def _read(files: Files, lineage: Lineage) -> list[tuple[Position, Record]]:
    return [(found.position, found.record) for found in records(files, lineage)]


def adopt(files: Files, claimant: Claimant) -> str:
    """Create the session's identity, or find it and check the base model; returns the lineage."""
    base = claimant.base_model
    mine = _BaseFile(base.name, base.revision, base.manifest_sha256)
    new = _IdentityFile(1, claimant.namespace, claimant.name, str(uuid.uuid4()), mine)
    try:
        files.create(layout.IDENTITY, _IDENTITY.dump_json(new, indent=2))
    except FileExistsError:
        with files.open_read(layout.IDENTITY) as file:
            content = file.read()
        try:
            found = _IDENTITY.validate_json(content, strict=True)
        except ValidationError as error:
            raise JournalDamaged(f"{layout.IDENTITY}: {error.errors()[0]['msg']}") from error
        if found.baseModel != mine:
            raise StorageMismatch(
                f"the storage holds a session of base model {found.baseModel.name!r} revision "
                f"{found.baseModel.revision!r} ({found.baseModel.manifestSHA256}), not {mine.name!r} "
                f"revision {mine.revision!r} ({mine.manifestSHA256})"
            ) from None
        return found.lineage
    log.info("storage created", lineage=new.lineage)
    return new.lineage
