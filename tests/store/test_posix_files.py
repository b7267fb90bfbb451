"""The real file layer: what it promises, and the order of calls that the promise stands on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everloop_trainer.store.files import PosixFiles


def test_create_is_exclusive_and_whole(tmp_path: Path) -> None:
    """The second creator is refused and changes nothing; no temporary file is left or listed."""
    files = PosixFiles(tmp_path)
    files.create("epochs/1.json", b"first")
    with pytest.raises(FileExistsError):
        files.create("epochs/1.json", b"second")
    assert (tmp_path / "epochs/1.json").read_bytes() == b"first"
    assert os.listdir(tmp_path / "epochs") == ["1.json"]


def test_create_syncs_data_before_the_name_and_the_name_before_returning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """write, fsync of the file, link, fsync of the directory: in this order."""
    files = PosixFiles(tmp_path)
    files.create("d/warm", b"")
    calls: list[str] = []
    fsync, link, write = os.fsync, os.link, os.write

    def spy_fsync(descriptor: int) -> None:
        kind = "directory" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file"
        calls.append(f"fsync {kind}")
        fsync(descriptor)

    def spy_link(source: Path, target: Path) -> None:
        calls.append("link")
        link(source, target)

    def spy_write(descriptor: int, data: memoryview) -> int:
        calls.append("write")
        return write(descriptor, data)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "link", spy_link)
    monkeypatch.setattr(os, "write", spy_write)
    files.create("d/f", b"data")
    assert calls == ["write", "fsync file", "link", "fsync directory"]


def test_new_directories_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in two new directories is reachable after power loss: each parent was synced."""
    synced: set[str] = set()
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").resolve()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    PosixFiles(tmp_path).open_append("a/b/journal").close()
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b"), str(tmp_path / "a/b/journal")} <= synced


def test_append_flushes_by_fdatasync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flush() is an fdatasync of this file; append() alone is none."""
    files = PosixFiles(tmp_path)
    file = files.open_append("journal/1.log")
    synced: list[str] = []
    fdatasync = os.fdatasync

    def spy(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").resolve()))
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", spy)
    file.append(b"one")
    assert synced == []
    file.append(b"two")
    file.flush()
    assert synced == [str(tmp_path / "journal/1.log")]
    file.close()
    assert (tmp_path / "journal/1.log").read_bytes() == b"onetwo"
    with pytest.raises(FileExistsError):
        files.open_append("journal/1.log")


def test_absence_is_told_from_failure(tmp_path: Path) -> None:
    """Only "no such file" means absent: a fence that cannot be read raises."""
    files = PosixFiles(tmp_path)
    assert not files.exists("epochs/2.json")
    (tmp_path / "epochs").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        files.exists("epochs/2.json")


def test_lists_hashes_and_deletes(tmp_path: Path) -> None:
    """Names sorted, hash and size of the content, deletion of a directory, none of what is not there."""
    files = PosixFiles(tmp_path)
    files.create("m/2/state", b"abc")
    files.create("m/1/state", b"")
    assert files.list("m") == ["1", "2"]
    assert files.list("nothing") == []
    assert files.sha256("m/2/state") == ("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 3)
    files.delete("m/2")
    files.delete("m/2")
    assert files.list("m") == ["1"]
    assert files.absolute("m/1/state") == str(tmp_path / "m/1/state")
    files.sync("m/1/state")
