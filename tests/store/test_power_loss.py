"""What the file layer promises when it returns still holds after power was lost, at whatever call of the system."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from everloop_trainer.durable import write_file
from everloop_trainer.store.files import PosixFiles
from tests.store.crash_files import Died
from tests.store.power import Machine, Recorder, Tree

SEED = 20300101
HOME = "tenant/run"
"""Where the session's storage lies below the volume: made by whoever comes first."""


def create(root: Path, name: str) -> None:
    PosixFiles(root).create(name, b"whole")


def append(root: Path, name: str) -> None:
    file = PosixFiles(root).open_append(name)
    file.append(b"who")
    file.append(b"le")
    file.flush()
    file.close()


def write_state(root: Path, name: str) -> None:
    write_file(root / name, [b"who", memoryview(b"le")], 0o600)


def name_only(root: Path, name: str) -> None:
    PosixFiles(root).open_append(name).close()


WRITERS: dict[str, tuple[Callable[[Path, str], None], bytes]] = {
    "create": (create, b"whole"),
    "append": (append, b"whole"),
    "state": (write_state, b"whole"),
    "new journal": (name_only, b""),
}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    """A volume that nothing was written to."""
    volume = tmp_path / "volume"
    volume.mkdir()
    return Recorder(volume)


def files_of(content: Tree) -> dict[str, bytes]:
    return {name: data for name, data in content.items() if data is not None}


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_what_was_written_is_there(recorder: Recorder, writer: str) -> None:
    """Content, name, and the names of all new directories above it."""
    write, content = WRITERS[writer]
    with recorder.recording():
        write(recorder.root / HOME, "a/b/file")
    assert files_of(Machine.after(recorder.events).durable()) == {f"{HOME}/a/b/file": content}


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_what_was_written_beside_a_killed_process_is_there(recorder: Recorder, writer: str) -> None:
    """Directories that a process made, which was killed before it flushed their names, are no ground to build on."""
    write, content = WRITERS[writer]
    with recorder.recording():
        for die_at in range(1, 30):
            recorder.revive()
            recorder.die_at = recorder.effects + 1 + die_at // 2
            first = f"{die_at}/b/first"
            try:
                write(recorder.root / HOME, first)
            except Died:
                pass
            recorder.revive()
            write(recorder.root / HOME, f"{die_at}/b/second")
            assert Machine.after(recorder.events).durable()[f"{HOME}/{die_at}/b/second"] == content


def test_a_created_file_is_whole_or_not_there(recorder: Recorder) -> None:
    """Whenever power is lost, and whatever is left: a name that can be read has its whole content."""
    chance = random.Random(SEED)
    with recorder.recording():
        create(recorder.root / HOME, "a/file")
    machine, seen = Machine(), set()
    for event in recorder.events:
        machine.take(event)
        for _ in range(20):
            seen.add(machine.survivor(chance).get(f"{HOME}/a/file"))
    assert seen == {None, b"whole"}


@pytest.mark.parametrize("writer", ["create", "append", "state"])
def test_what_a_killed_process_left_is_made_durable(recorder: Recorder, writer: str) -> None:
    """`sync` keeps what can be read: content and name, whoever wrote it, and however far it had come."""
    write, _ = WRITERS[writer]
    found = 0
    with recorder.recording():
        for ahead in range(1, 20):
            name = f"{ahead}/file"
            recorder.die_at = recorder.effects + ahead
            try:
                write(recorder.root / HOME, name)
            except Died:
                pass
            recorder.revive()
            files = PosixFiles(recorder.root / HOME)
            if files.exists(name):
                found += 1
                files.sync(name)
                with files.open_read(name) as file:
                    assert Machine.after(recorder.events).durable()[f"{HOME}/{name}"] == file.read()
    assert found > 1


def test_a_deletion_may_come_back_in_part_but_never_in_part_of_a_file(recorder: Recorder) -> None:
    """Deletions are not flushed: after a loss of power each name may be there again, with its content."""
    chance = random.Random(SEED)
    with recorder.recording():
        for name in ("s/1/data", "s/1/manifest", "s/2/data"):
            create(recorder.root, name)
        PosixFiles(recorder.root).delete("s/1")
    machine = Machine.after(recorder.events)
    assert files_of(machine.tree()) == {"s/2/data": b"whole"}
    left = [files_of(machine.survivor(chance)) for _ in range(50)]
    assert all(survivor["s/2/data"] == b"whole" for survivor in left)
    assert {name for survivor in left for name in survivor} == {"s/1/data", "s/1/manifest", "s/2/data"}
    assert {data for survivor in left for data in survivor.values()} == {b"whole"}


def test_a_directory_made_again_after_its_deletion_is_durable(recorder: Recorder) -> None:
    """What a process remembers of its directories ends with them."""
    with recorder.recording():
        files = PosixFiles(recorder.root)
        files.create("probe/1", b"")
        files.delete("probe")
        files.create("probe/2", b"again")
    assert files_of(Machine.after(recorder.events).durable())["probe/2"] == b"again"
