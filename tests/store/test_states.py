"""Stored states: what counts, what is verified, what is deleted and by whom."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import IO

import pytest

from everloop_trainer.session.errors import Fenced, StorageFailed
from everloop_trainer.session.identifiers import request_id, storage_id
from everloop_trainer.session.ports import Lora, Manifest, Position, StateKind
from everloop_trainer.store import layout
from everloop_trainer.store.epochs import claim
from everloop_trainer.store.opening import OpenedStore, open_store
from tests.session.fake_engine import PREFIX
from tests.session.world import BASE, TIME, A, claimant
from tests.store.crash_files import CrashFiles, Disk
from tests.store.records import accept

DATA = b"adapter"


def newest(stored: Sequence[Manifest]) -> set[str]:
    """The keys of the newest two snapshots."""
    return {manifest.key for manifest in stored[:2]}


async def opened(disk: Disk, attempt: int = 1) -> OpenedStore:
    return await open_store(CrashFiles(disk), claimant(attempt, f"pod-{attempt}"), TIME)


async def stored(
    store: OpenedStore, disk: Disk, seq: int, *, kind: StateKind = "snapshots", stands_on: Position | None = None
) -> Manifest:
    """A state as an engine and the session store it."""
    position, durable = store.journal.append(accept(seq))
    await durable
    place = store.states.place(kind, A, seq, 1)
    CrashFiles(disk).create(place.path.removeprefix(PREFIX), DATA)
    manifest = Manifest(
        kind=kind,
        key=place.key,
        model=A,
        operation=request_id(A, seq),
        seq=seq,
        step=3,
        stands_on=stands_on or position,
        base_model=BASE,
        lora=Lora(4, 7, True, True, False),
        alpha=32,
        sha256=hashlib.sha256(DATA).hexdigest(),
        size=len(DATA),
        time=TIME,
        name="n",
        ttl_seconds=3600,
        user_metadata={"a": [1, None]},
    )
    await store.states.commit(manifest)
    return manifest


async def test_a_manifest_comes_back_in_the_next_incarnation() -> None:
    """Every field survives, and the data is found intact."""
    disk = Disk()
    store = await opened(disk)
    manifest = await stored(store, disk, 1)
    await store.journal.close()
    disk.lose_power()
    store = await opened(disk, 2)
    assert await store.states.snapshots(A) == [manifest]
    assert await store.states.intact(manifest)
    assert await store.states.find("snapshots", A, manifest.operation) == manifest
    await store.journal.close()


async def test_newest_first() -> None:
    """By number of the last operation, not by name."""
    disk = Disk()
    store = await opened(disk)
    for seq in (2, 10, 9):
        await stored(store, disk, seq)
    assert [manifest.seq for manifest in await store.states.snapshots(A)] == [10, 9, 2]
    await store.journal.close()


async def test_data_that_changed_or_vanished_is_not_intact() -> None:
    """Size and hash decide."""
    disk = Disk()
    store = await opened(disk)
    manifest = await stored(store, disk, 1)
    path = f"{layout.state(storage_id(A), 'snapshots', manifest.key)}/{layout.STATE}"
    disk.files[path].written = b"adapteR"
    assert not await store.states.intact(manifest)
    assert await store.states.find("snapshots", A, manifest.operation) is None
    del disk.files[path]
    assert not await store.states.intact(manifest)
    await store.journal.close()


async def test_data_that_the_disk_cannot_read_is_not_intact() -> None:
    """It is of no more use than damaged data; trouble with the storage as a whole ends the incarnation."""

    class Failing(CrashFiles):
        def sha256(self, path: str) -> tuple[str, int]:
            raise OSError(number, os.strerror(number), path)

    disk = Disk()
    store = await open_store(Failing(disk), claimant(), TIME)
    manifest = await stored(store, disk, 1)
    number = errno.EIO
    assert not await store.states.intact(manifest)
    number = errno.ESTALE
    with pytest.raises(StorageFailed):
        await store.states.intact(manifest)
    await store.journal.close()


async def test_a_manifest_outside_the_sealed_history_does_not_count() -> None:
    """A zombie's state that stands on a record which nobody sealed is none."""
    disk = Disk()
    old = await opened(disk)
    kept = await stored(old, disk, 1)
    new = await opened(disk, 2)
    end = new.journal.places.lengths[1]
    late = replace(kept, key="1-2", seq=2, stands_on=Position(1, end))
    directory = layout.state(storage_id(A), "snapshots", late.key)
    content = disk.files[f"{layout.state(storage_id(A), 'snapshots', kept.key)}/{layout.MANIFEST}"].written
    edited = content.replace(b'"seq": 1', b'"seq": 2').replace(
        f'"journal_offset": {kept.stands_on.offset}'.encode(), f'"journal_offset": {end}'.encode()
    )
    assert edited != content
    CrashFiles(disk).create(f"{directory}/{layout.MANIFEST}", edited)
    assert [manifest.key for manifest in await new.states.snapshots(A)] == [kept.key]
    await old.journal.close()
    await new.journal.close()


async def test_the_fence_is_read_before_a_manifest_and_before_a_deletion() -> None:
    """A superseded incarnation neither adds nor removes anything."""
    disk = Disk()
    store = await opened(disk)
    for seq in (1, 2, 3):
        await stored(store, disk, seq)
    claim(CrashFiles(disk), 2, "pod-2", TIME)
    before = sorted(disk.files)
    manifest = (await store.states.snapshots(A))[0]
    with pytest.raises(Fenced):
        await store.states.commit(replace(manifest, key="1-9"))
    with pytest.raises(Fenced):
        await store.states.retain(A, newest)
    assert sorted(disk.files) == before
    await store.journal.close()


async def test_the_snapshot_of_a_load_stays() -> None:
    """The newest two, and the one that a loaded model could not come back without if both were damaged."""
    disk = Disk()
    store = await opened(disk)
    keys = [(await stored(store, disk, seq)).key for seq in (1, 2, 3, 4)]
    await store.states.retain(A, lambda stored: {keys[0], *newest(stored)})
    assert {manifest.key for manifest in await store.states.snapshots(A)} == {keys[0], keys[2], keys[3]}
    await store.journal.close()


async def test_a_deletion_reads_the_fence_itself() -> None:
    """A claim that comes after the listing stops the deletion all the same."""
    disk = Disk()
    store = await opened(disk)
    for seq in (1, 2, 3):
        await stored(store, disk, seq)
    retaining = asyncio.create_task(store.states.retain(A, newest))
    listing = store.states._files.list
    files = store.states._files
    assert isinstance(files, CrashFiles)

    def list_then_claim(path: str) -> list[str]:
        names = listing(path)
        if path.endswith("snapshots") and layout.epoch(2) not in disk.files:
            claim(CrashFiles(disk), 2, "pod-2", TIME)
        return names

    files.list = list_then_claim  # type: ignore[method-assign]
    before = {name for name in disk.files if "snapshots" in name}
    with pytest.raises(Fenced):
        await retaining
    assert {name for name in disk.files if "snapshots" in name} == before
    await store.journal.close()


async def test_two_snapshots_are_kept_and_the_leavings_of_the_dead_go() -> None:
    """The newest two stay; older ones and unfinished ones of earlier incarnations go; our own unfinished one stays."""
    disk = Disk()
    old = await opened(disk)
    await stored(old, disk, 1)
    CrashFiles(disk).create(old.states.place("snapshots", A, 2, 1).path.removeprefix(PREFIX), b"half")
    await old.journal.close()
    store = await opened(disk, 2)
    for seq in (3, 4):
        await stored(store, disk, seq)
    CrashFiles(disk).create(store.states.place("snapshots", A, 5, 1).path.removeprefix(PREFIX), b"in progress")
    await store.states.retain(A, newest)
    assert CrashFiles(disk).list(layout.states(storage_id(A), "snapshots")) == ["2-3", "2-4", "2-5"]
    await store.journal.close()


@pytest.mark.parametrize("moment", range(1, 12))
async def test_a_snapshot_that_a_load_commits_meanwhile_stays(moment: int) -> None:
    """Older ones are deleted in the background while a load stores the one that its model will stand on."""
    disk = Disk()
    store = await opened(disk)
    for seq in (1, 2, 3):
        await stored(store, disk, seq)
    loaded = await stored(store, disk, 4)
    path = f"{layout.state(storage_id(A), 'snapshots', loaded.key)}/{layout.MANIFEST}"
    content = disk.files.pop(path)
    files = store.states._files
    assert isinstance(files, CrashFiles)
    checking, checks = files.check, itertools.count(1)

    def check() -> None:
        checking()
        if next(checks) == moment:
            disk.files[path] = content

    files.check = check  # type: ignore[method-assign]
    await store.states.retain(A, newest)
    disk.files[path] = content
    assert await store.states.intact(loaded)
    assert loaded in await store.states.snapshots(A)
    await store.journal.close()


async def test_a_save_reads_no_other_saves() -> None:
    """Looking for an operation's own checkpoint opens those of its number only, however many the model has."""
    disk = Disk()
    store = await opened(disk)
    manifests = [await stored(store, disk, seq, kind="weights") for seq in (1, 2, 3, 11)]
    files = store.states._files
    assert isinstance(files, CrashFiles)
    opening, read = files.open_read, []

    def noting(path: str) -> IO[bytes]:
        read.append(path)
        return opening(path)

    files.open_read = noting  # type: ignore[method-assign]
    assert await store.states.find("weights", A, request_id(A, 1)) == manifests[0]
    assert await store.states.find("weights", A, request_id(A, 4)) is None
    assert {path.split("/")[-2] for path in read if path.endswith(layout.MANIFEST)} == {"1-1"}
    await store.journal.close()


async def test_a_snapshot_may_be_deleted_while_others_are_listed() -> None:
    """A deletion for an engine's last snapshot is no failure of the storage for who restores the model meanwhile."""
    disk = Disk()
    store = await opened(disk)
    for seq in (1, 2, 3):
        await stored(store, disk, seq)
    files = store.states._files
    assert isinstance(files, CrashFiles)
    listing = files.list

    def list_then_delete(path: str) -> list[str]:
        names = listing(path)
        files.delete(f"{path}/1-1")
        return names

    files.list = list_then_delete  # type: ignore[method-assign]
    assert [manifest.seq for manifest in await store.states.snapshots(A)] == [3, 2]
    await store.journal.close()


async def test_each_engine_writes_to_places_of_its_own() -> None:
    """A lost engine may still be writing: the next one never meets its file."""
    store = await opened(Disk())
    places = {store.states.place("weights", A, 7, generation).path for generation in (1, 2, 3)}
    assert len(places) == 3
    assert store.states.place("weights", A, 7, 1).key == "1-7"
    await store.journal.close()
