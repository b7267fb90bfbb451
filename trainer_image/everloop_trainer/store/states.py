"""Stored model states: the data first, written by an engine, then the manifest that makes it count."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import structlog
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from everloop_trainer.session.errors import StorageFailed
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.ports import Lora, Manifest, Place, Position, StateKind, Written
from everloop_trainer.session.status import BaseModel
from everloop_trainer.store import layout
from everloop_trainer.store.files import Files
from everloop_trainer.store.journal import JournalWriter
from everloop_trainer.store.space import is_full

THREADS = 8
STRICT = ConfigDict(extra="forbid")
T = TypeVar("T")
log = structlog.get_logger(__name__)


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class _BaseFile:
    name: str
    revision: str
    manifestSHA256: str  # noqa: N815 - the key in the file


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class _DataFile:
    name: Literal["state.safetensors"]
    sha256: str
    bytes: int


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class _ManifestFile:
    format: Literal[1]
    kind: StateKind
    model_id: str
    operation: str
    seq: int
    step: int
    incarnation: int
    journal_offset: int
    base_model: _BaseFile
    lora: Lora
    alpha: int
    file: _DataFile
    time: str
    name: str | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    source: str | None = None


_MANIFEST = TypeAdapter(_ManifestFile)


class StoredStates:
    """session.ports.States under a session's root."""

    def __init__(self, files: Files, journal: JournalWriter) -> None:
        self._files = files
        self._journal = journal
        # Of its own: what hangs here must not take the threads on which the fence and the journal are read.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="states")

    def place(self, kind: StateKind, model: str, seq: int, generation: int) -> Place:
        """See session.ports.States. A lost engine may still be writing, so each engine has places of its own."""
        again = f".{generation}" if generation > 1 else ""
        key = f"{self._journal.number}-{seq}{again}"
        return Place(key, self.path(kind, model, key))

    def path(self, kind: StateKind, model: str, key: str) -> str:
        """See session.ports.States."""
        return self._files.absolute(f"{layout.state(storage_id(model), kind, key)}/{layout.STATE}")

    async def commit(self, manifest: Manifest) -> None:
        """See session.ports.States."""
        await self._journal.check_fence()
        directory = layout.state(storage_id(manifest.model), manifest.kind, manifest.key)
        content = manifest_to_json(manifest)
        await self._io(lambda: self._files.create(f"{directory}/{layout.MANIFEST}", content))

    async def snapshots(self, model: str) -> list[Manifest]:
        """See session.ports.States."""
        found = await self._io(lambda: self._counting("snapshots", model))
        return sorted(found, key=lambda manifest: (manifest.seq, _writer(manifest.key)), reverse=True)

    async def find(self, kind: StateKind, model: str, operation: str) -> Manifest | None:
        """See session.ports.States."""
        seq = int(operation.rpartition(":")[2])  # models may have thousands of checkpoints: read those of this number
        for manifest in await self._io(lambda: self._counting(kind, model, seq)):
            if manifest.operation == operation and await self.intact(manifest):
                return manifest
        return None

    async def intact(self, manifest: Manifest) -> bool:
        """Whether the data has the size and hash that the manifest names."""
        return await self.holds(manifest.kind, manifest.model, manifest.key, Written(manifest.sha256, manifest.size))

    async def holds(self, kind: StateKind, model: str, key: str, written: Written) -> bool:
        """See session.ports.States."""
        path = f"{layout.state(storage_id(model), kind, key)}/{layout.STATE}"

        def check() -> bool:
            try:
                return self._files.sha256(path) == (written.sha256, written.size)
            except FileNotFoundError:  # a snapshot may be deleted, as too old, while it is looked at
                return False
            except OSError as error:
                if error.errno != errno.EIO:  # of this file only, as far as is known: bytes that cannot be read
                    raise
                return False

        intact = await self._io(check)
        if not intact:
            log.error("stored state is not what its manifest says", path=path)
        return intact

    async def retain(self, model: str, choose: Callable[[Sequence[Manifest]], Collection[str]]) -> None:
        """See session.ports.States. What older incarnations left unfinished goes too."""
        directory = layout.states(storage_id(model), "snapshots")
        # Listed before the manifests are read: what is committed meanwhile, by a load, is none of the old ones.
        keys = await self._io(lambda: self._files.list(directory))
        stored = await self.snapshots(model)
        counting, stay = {manifest.key for manifest in stored}, choose(stored)
        for key in keys:
            unfinished = _writer(key) == self._journal.number and key not in counting
            if key not in stay and not unfinished:
                await self.delete("snapshots", model, key)

    async def keys(self, kind: StateKind, model: str) -> list[tuple[str, int, int]]:
        """See session.ports.States."""
        directory = layout.states(storage_id(model), kind)
        names = await self._io(lambda: self._files.list(directory))
        return [(name, _writer(name), seq) for name in names if (seq := _number(name)) is not None]

    async def delete(self, kind: StateKind, model: str, key: str) -> None:
        """See session.ports.States."""
        await self._journal.check_fence()
        directory = layout.state(storage_id(model), kind, key)
        await self._io(lambda: self._files.delete(directory))
        log.info("old state deleted", path=directory)

    def _counting(self, kind: StateKind, model: str, seq: int | None = None) -> list[Manifest]:
        directory = layout.states(storage_id(model), kind)
        counting = []
        for key in self._files.list(directory):
            if seq is not None and _number(key) != seq:
                continue
            path = f"{directory}/{key}/{layout.MANIFEST}"
            try:
                manifest = self._read(path, key)
                if manifest is None or manifest.model != model or not self._journal.counts(manifest.stands_on):
                    continue
                if _writer(key) != self._journal.number:
                    # Its writer may have been killed before the flush: count it, but let it not vanish.
                    self._files.sync(path)
            except FileNotFoundError:  # not written yet, or deleted this moment: an older engine's last snapshot came
                continue
            counting.append(manifest)
        return counting

    def _read(self, path: str, key: str) -> Manifest | None:
        with self._files.open_read(path) as file:
            content = file.read()
        return manifest_from_json(content, key, path)

    async def _io(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except OSError as error:
            if is_full(error.errno):
                await self._journal.out_of_space(str(error))
            raise StorageFailed(str(error)) from error


def _writer(key: str) -> int:
    """The incarnation that a key names; 0 for a name that is no key."""
    number = key.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _number(key: str) -> int | None:
    """The number of the operation that a key names; None for a name that is no key."""
    number = key.partition("-")[2].partition(".")[0]
    return int(number) if number.isdecimal() else None


def manifest_to_json(manifest: Manifest) -> bytes:
    """A manifest as it is stored."""
    base = manifest.base_model
    return _MANIFEST.dump_json(
        _ManifestFile(
            format=1,
            kind=manifest.kind,
            model_id=manifest.model,
            operation=manifest.operation,
            seq=manifest.seq,
            step=manifest.step,
            incarnation=manifest.stands_on.incarnation,
            journal_offset=manifest.stands_on.offset,
            base_model=_BaseFile(base.name, base.revision, base.manifest_sha256),
            lora=manifest.lora,
            alpha=manifest.alpha,
            file=_DataFile("state.safetensors", manifest.sha256, manifest.size),
            time=manifest.time,
            name=manifest.name,
            ttl_seconds=manifest.ttl_seconds,
            user_metadata=manifest.user_metadata,
            source=manifest.source,
        ),
        indent=2,
        exclude={"source"} if manifest.source is None else None,  # an older version need not know what is not used
    )


def manifest_from_json(content: bytes, key: str, path: str) -> Manifest | None:
    """The manifest, or None if it cannot be read: then the state does not count, and replay does without."""
    try:
        found = _MANIFEST.validate_json(content, strict=True)
    except ValidationError as error:
        log.error("manifest cannot be read", path=path, error=error.errors()[0]["msg"])
        return None
    return Manifest(
        kind=found.kind,
        key=key,
        model=found.model_id,
        operation=found.operation,
        seq=found.seq,
        step=found.step,
        stands_on=Position(found.incarnation, found.journal_offset),
        base_model=BaseModel(found.base_model.name, found.base_model.revision, found.base_model.manifestSHA256),
        lora=found.lora,
        alpha=found.alpha,
        sha256=found.file.sha256,
        size=found.file.bytes,
        time=found.time,
        name=found.name,
        ttl_seconds=found.ttl_seconds,
        user_metadata=found.user_metadata,
        source=found.source,
    )
