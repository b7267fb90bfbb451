"""Power lost while an empty storage is filled from its copies: what then has an identity is whole."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path

import pytest

from everloop_trainer.copies.copier import directory
from everloop_trainer.copies.protocol import State, Wanted
from everloop_trainer.copies.restore import restore
from everloop_trainer.store import layout
from everloop_trainer.store.restored import read_restored
from tests.copies.states import ID, Root, bucket, copier
from tests.copies.store import Store
from tests.store.crash_files import Died
from tests.store.power import Machine, Name, Recorder, Tree, lay_out

SEED, TRIES = 20300101, 4


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def data(tmp_path: Path, store: Store, secret: Path, prefix: str) -> bytes:
    """Of a checkpoint that was copied."""
    root = Root(tmp_path / "lost")
    number = root.claim()
    saved = root.write("weights", 4, name="half", size=20_000)
    made = copier(root, bucket(store, secret, prefix), number)
    wanted = Wanted((saved,), (ID,))
    while todo := made.due(wanted):
        made.do(todo[0])
    return root.data(saved)


def test_a_storage_with_an_identity_is_whole(
    data: bytes, tmp_path: Path, store: Store, secret: Path, prefix: str
) -> None:
    """After every call of the system; and a restore that was told of as done has an identity."""
    volume = tmp_path / "volume"
    volume.mkdir()
    recorder = Recorder(volume)
    with recorder.recording():
        assert restore(Root(volume).files, bucket(store, secret, prefix))
    chance = random.Random(SEED)
    for count in range(len(recorder.events) + 1):
        machine = Machine.after(recorder.events[:count])
        for number, left in enumerate([machine.durable(), *(machine.survivor(chance) for _ in range(TRIES))]):
            if layout.IDENTITY in left:
                check(left, data, tmp_path / f"{count}-{number}")
    assert layout.IDENTITY in Machine.after(recorder.events).durable()


def test_a_restore_makes_durable_what_a_killed_one_left(
    data: bytes, tmp_path: Path, store: Store, secret: Path, prefix: str
) -> None:
    """Killed between a name and its flush, and done again: all of it outlasts power loss."""
    done, die_at, checked = False, 0, 0
    while not done:
        die_at += 1
        volume = tmp_path / f"volume-{die_at}"
        volume.mkdir()
        recorder = Recorder(volume)
        recorder.die_at = die_at
        with recorder.recording():
            try:
                done = restore(Root(volume).files, bucket(store, secret, prefix))
            except Died:
                last = recorder.events[-1] if recorder.events else None
                if not (isinstance(last, Name) and last.name.endswith(".json")):
                    continue  # only a name that is not flushed yet can be taken for one that is
                recorder.revive()
                restore(Root(volume).files, bucket(store, secret, prefix))
        check(Machine.after(recorder.events).durable(), data, tmp_path / f"left-{die_at}")
        checked += 1
    assert checked > 3


def check(left: Tree, data: bytes, place: Path) -> None:
    """The checkpoint is there with its manifest, and the model says that it goes back to it."""
    state = directory(State("weights", ID, "1-4"))
    found = left.get(f"{state}/{layout.STATE}")
    assert found is not None
    assert sha256(found).digest() == sha256(data).digest()
    assert left.get(f"{state}/{layout.MANIFEST}")
    lay_out(left, place)
    [model] = read_restored(Root(place).files)
    assert [each.name for each in model.checkpoints] == ["half"]
