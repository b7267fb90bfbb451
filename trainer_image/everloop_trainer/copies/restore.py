"""The way back: an empty storage is filled with what the copies of the lost one hold.

Checkpoints come back as they were. Of each model the newest snapshot becomes a checkpoint, `restored-<step>`, unless
one with a name holds the same state. Results and requests are in the journal only, and that is gone: so no model goes
on by itself.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import structlog
from typing_extensions import Buffer

from everloop_trainer import peftfiles
from everloop_trainer.about import About
from everloop_trainer.copies.bucket import Bucket, CopyFailed
from everloop_trainer.copies.copier import directory, state_of
from everloop_trainer.copies.protocol import State
from everloop_trainer.durable import Directories, write_all
from everloop_trainer.session.identifiers import storage_id, tinker_path
from everloop_trainer.session.ports import Manifest
from everloop_trainer.session.rollback import RestoredCheckpoint, RolledBack
from everloop_trainer.store import layout
from everloop_trainer.store.files import FILE_MODE, TEMPORARY, Files
from everloop_trainer.store.restored import write_restored
from everloop_trainer.store.states import manifest_from_json, manifest_to_json

log = structlog.get_logger(__name__)


def restore(files: Files, bucket: Bucket) -> bool:
    """Fills a storage without an identity. Returns whether there were copies.

    May be killed anywhere and begun again, also by two at once: each file appears whole, and the identity comes last.

    Raises:
        CopyFailed: S3 could not be read.
        OSError: the storage failed.
    """
    identity = bucket.get(layout.IDENTITY)
    if identity is None:
        log.info("nothing to restore", copies=bucket.uri)
        return False
    log.warning("the storage is empty: restoring it", copies=bucket.uri)
    fetched = [manifest for manifest in chosen(_manifests(bucket)) if _fetch(files, bucket, manifest)]
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    models = rolled_back(fetched, now)
    write_restored(files, models)
    for path in list(bucket.list(f"{layout.EPOCHS}/"))[-1:]:
        _create(files, path, bucket.get(path) or b"")
    _create(files, layout.IDENTITY, identity)
    log.warning("storage restored", models=len(models), states=len(fetched))
    return True


def chosen(manifests: Iterable[Manifest]) -> list[Manifest]:
    """What comes back: all checkpoints, and of each model the newest snapshot as one. Pure."""
    found = list(manifests)
    saved = [manifest for manifest in found if manifest.kind != "snapshots"]
    newest: dict[str, Manifest] = {}
    for manifest in found:
        other = newest.get(manifest.model)
        if manifest.kind == "snapshots" and (other is None or _order(other) < _order(manifest)):
            newest[manifest.model] = manifest
    for manifest in newest.values():
        known = [each for each in saved if each.model == manifest.model and each.kind == "weights"]
        if any(each.sha256 == manifest.sha256 or _order(each) >= _order(manifest) for each in known):
            continue
        names = {each.name for each in known}
        name = f"restored-{manifest.step}"
        if name in names:
            name = f"restored-{manifest.step}-{manifest.seq}"
        saved.append(replace(manifest, kind="weights", name=name))
    return saved


def rolled_back(manifests: Sequence[Manifest], time: str) -> tuple[RolledBack, ...]:
    """What is left of each model. Pure."""
    models = []
    for model in dict.fromkeys(manifest.model for manifest in manifests):
        own = sorted((each for each in manifests if each.model == model), key=_order)
        resume = next((each for each in reversed(own) if each.kind == "weights"), None)
        last = own[-1]
        path = tinker_path(model, "weights", resume.name) if resume is not None and resume.name is not None else ""
        models.append(
            RolledBack(
                model_id=model,
                base_model=last.base_model.name,
                lora=last.lora,
                number=last.seq,
                step=resume.step if resume is not None else last.step,
                resume=path,
                time=time,
                checkpoints=tuple(_checkpoint(each) for each in own),
                source=last.source or "",
            )
        )
    return tuple(models)


def _order(manifest: Manifest) -> tuple[int, int]:
    return manifest.seq, manifest.stands_on.incarnation


def _checkpoint(manifest: Manifest) -> RestoredCheckpoint:
    assert manifest.name is not None, "only what has a name is copied, and a snapshot got one"
    return RestoredCheckpoint(
        kind=manifest.kind,
        key=manifest.key,
        name=manifest.name,
        step=manifest.step,
        sha256=manifest.sha256,
        size=manifest.size,
        time=manifest.time,
        user_metadata=manifest.user_metadata,
    )


def _manifests(bucket: Bucket) -> list[Manifest]:
    found = []
    for path in bucket.list("models/"):
        state = state_of(path)
        if state is None or not path.endswith(f"/{layout.MANIFEST}"):
            continue
        content = bucket.get(path)
        manifest = None if content is None else manifest_from_json(content, state.key, path)
        if manifest is not None and (manifest.kind == "snapshots" or manifest.name is not None):
            found.append(manifest)
    return found


def _fetch(files: Files, bucket: Bucket, manifest: Manifest) -> bool:
    """One state: data, then manifest. Returns False for one whose data is not what its manifest says."""
    model = storage_id(manifest.model)
    target = layout.state(model, manifest.kind, manifest.key)
    sources = [State(manifest.kind, model, manifest.key), State("snapshots", model, manifest.key)]
    written = (manifest.sha256, manifest.size)
    path = f"{target}/{layout.STATE}"
    if not files.exists(path) or files.sha256(path) != written:
        source = next((each for each in sources if bucket.stored(f"{directory(each)}/{layout.STATE}") == written), None)
        if source is None:
            log.error("a copy is not what its manifest says: left out", path=f"{bucket.uri}{target}")
            return False
        _download(files, bucket, f"{directory(source)}/{layout.STATE}", path)
        if files.sha256(path) != written:
            raise CopyFailed(f"{bucket.uri}{path}: came damaged")
    if manifest.kind == "sampler_weights" and manifest.name is not None:
        base = manifest.base_model
        about = About(base.name, base.revision, manifest.model, manifest.name)
        peftfiles.complete(Path(files.absolute(path)), about)
    _create(files, f"{target}/{layout.MANIFEST}", manifest_to_json(manifest))
    log.info("restored", path=target, bytes=manifest.size)
    return True


def _download(files: Files, bucket: Bucket, source: str, path: str) -> None:
    """An object as a file that is there whole or not at all; replaces one that is there.

    Its name is on disk with that of the manifest.
    """
    target = Path(files.absolute(path))
    Directories().make(target.parent)
    temporary = target.parent / (TEMPORARY + secrets.token_hex(8))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            bucket.download(source, _Unbuffered(descriptor))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)


class _Unbuffered(io.RawIOBase):
    """Takes the parts of an object in their order."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        return write_all(self._descriptor, data)


def _create(files: Files, path: str, content: bytes) -> None:
    try:
        files.create(path, content)
    except FileExistsError:
        files.sync(path)  # by an earlier try, or by another one this moment: who may be killed before the flush
