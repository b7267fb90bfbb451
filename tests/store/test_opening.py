"""Adopting storage: same base model or nothing; and the history for people."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import pytest

from everloop_trainer.session.errors import Fenced, JournalDamaged, StorageMismatch
from everloop_trainer.session.status import BaseModel
from everloop_trainer.store.compacting import Compactor
from everloop_trainer.store.dump import dump, shown
from everloop_trainer.store.files import PosixFiles
from everloop_trainer.store.opening import open_store
from tests.session.world import BASE, TIME, claimant
from tests.store.crash_files import CrashFiles, Disk
from tests.store.records import accept


async def test_storage_is_adopted_with_its_lineage(tmp_path: Path) -> None:
    """A session created again on the same storage goes on where it was."""
    first = await open_store(PosixFiles(tmp_path), claimant(1), TIME)
    await first.journal.close()
    second = await open_store(PosixFiles(tmp_path), claimant(2, "pod-2"), TIME)
    await second.journal.close()
    assert second.lineage == first.lineage
    assert second.previous == first.incarnation
    assert json.loads((tmp_path / "identity.json").read_text())["baseModel"]["name"] == BASE.name


@pytest.mark.parametrize(
    "other", [replace(BASE, name="other"), replace(BASE, revision="r2"), replace(BASE, manifest_sha256="cd" * 32)]
)
async def test_another_base_model_is_refused_before_anything_is_claimed(tmp_path: Path, other: BaseModel) -> None:
    """Name, revision and hash of the base model must all be those of the stored session."""
    first = await open_store(PosixFiles(tmp_path), claimant(1), TIME)
    await first.journal.close()
    with pytest.raises(StorageMismatch, match=f"not '{other.name}'"):
        await open_store(PosixFiles(tmp_path), claimant(2, "pod-2", other), TIME)
    assert len(list((tmp_path / "epochs").iterdir())) == 1


async def test_an_older_attempt_is_fenced(tmp_path: Path) -> None:
    """A pod of a lesser attempt that comes late owns nothing."""
    first = await open_store(PosixFiles(tmp_path), claimant(2, "pod-2"), TIME)
    await first.journal.close()
    with pytest.raises(Fenced, match="attempt 1 of pod pod-1"):
        await open_store(PosixFiles(tmp_path), claimant(1), TIME)


async def test_dump_shows_the_history_and_claims_nothing(tmp_path: Path) -> None:
    """Records of every incarnation in order, bodies as length and hash; the live journal is left alone."""
    first = await open_store(PosixFiles(tmp_path), claimant(1), TIME)
    await first.journal.append(accept(1), b"abc")[1]
    await first.journal.close()
    second = await open_store(PosixFiles(tmp_path), claimant(2, "pod-2"), TIME)
    await second.journal.append(accept(2))[1]
    told = [json.loads(json.dumps(record)) for record in dump(tmp_path)]
    assert [(record["incarnation"], record["t"]) for record in told] == [
        (1, "open"),
        (1, "accept"),
        (2, "open"),
        (2, "accept"),
    ]
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert told[1]["body"] == {"bytes": 3, "sha256": sha256}
    assert told[1]["k"] == "forward_backward"
    assert "body" not in told[3]
    await second.journal.append(accept(3))[1]  # still the owner
    await second.journal.close()


async def test_dump_shows_a_base_as_one_value(tmp_path: Path) -> None:
    """What it stands for is counted, not listed; what follows it is shown as ever."""
    store = await open_store(PosixFiles(tmp_path), claimant(1), TIME)
    await store.journal.append(accept(1), b"abc")[1]
    await store.compactor.replace(await store.compactor.compact({}, {}))
    await store.journal.append(accept(2))[1]
    base, *rest = [json.loads(json.dumps(record)) for record in dump(tmp_path)]
    assert base["t"] == "base"
    assert [(stream["entries"], stream["owed"], stream["gone"]) for stream in base["streams"]] == [(1, 0, [])]
    assert [record["t"] for record in rest] == ["open", "open", "accept"]
    await store.journal.close()


async def test_dump_of_nothing_and_of_damage(tmp_path: Path) -> None:
    """No session, and a broken one, are told apart."""
    with pytest.raises(FileNotFoundError, match="holds no session"):
        dump(tmp_path)
    store = await open_store(PosixFiles(tmp_path), claimant(1), TIME)
    await store.journal.append(accept(1))[1]
    await store.journal.close()
    path = tmp_path / "journal/00000001.log"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalDamaged, match="damaged at offset 5"):
        dump(tmp_path)


@dataclass
class Beside(CrashFiles):
    """Something happens just before one of the openings of a file to read, counted from 1."""

    at: int = 0
    opened: int = 0
    meanwhile: Callable[[], None] | None = None

    def open_read(self, path: str) -> IO[bytes]:
        self.opened += 1
        if self.meanwhile is not None and self.opened == self.at:
            self.meanwhile()
        return super().open_read(path)


async def _compact(compactor: Compactor) -> None:
    await compactor.replace(await compactor.compact({}, {}))


async def test_dump_outlasts_a_compaction_at_any_moment() -> None:
    """Files that it was about to read are deleted: then it shows the base that took their place."""
    loop, at = asyncio.get_running_loop(), 0
    bases, files = 0, Beside(Disk())
    while files.opened >= at:
        at += 1
        disk = Disk()
        store = await open_store(CrashFiles(disk), claimant(1), TIME)
        for seq in (1, 2):
            await store.journal.append(accept(seq), b"abc")[1]
            await store.journal.rotate()

        def meanwhile(compactor: Compactor = store.compactor) -> None:
            asyncio.run_coroutine_threadsafe(_compact(compactor), loop).result()

        files = Beside(disk, at=at, meanwhile=meanwhile)
        first, *rest = await asyncio.to_thread(shown, files, "disk")
        bases += first["t"] == "base"
        numbers = [record["n"] for record in rest if record["t"] == "accept"]
        assert numbers == ([] if first["t"] == "base" else [1, 2])
        await store.journal.close()
    assert 1 < bases < at
