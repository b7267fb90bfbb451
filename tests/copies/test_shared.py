"""Checkpoints that share a file in the storage have one each in S3, and come back or go without each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from everloop_trainer.copies.bucket import CopyFailed
from everloop_trainer.copies.client import _wanted
from everloop_trainer.copies.copier import Copier, described_as, directory
from everloop_trainer.copies.protocol import WANTED, SharedFile, State, Wanted
from everloop_trainer.copies.restore import restore
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.ports import Shared, StateKind, StateRef
from everloop_trainer.store.restored import read_restored
from tests.copies.states import ID, MODEL, Root, bucket, copier
from tests.copies.store import Store

RUN = "s-copy:train:0"
SOURCE = f"tinker://{MODEL}/weights/half"
SINCE = "2030-01-02T00:00:00Z"
SHARED = SharedFile(ID, RUN, SOURCE, SINCE)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"s-{request.node.name.partition('[')[0]}"


def copy_of(state: State) -> State:
    """The checkpoint of RUN that has the file of that state."""
    return State(state.kind, storage_id(RUN), state.key, SHARED)


def work_off(made: Copier, *states: State) -> None:
    wanted = Wanted(states, (ID, storage_id(RUN)))
    while todo := made.due(wanted):
        made.do(todo[0])


def test_what_is_wanted_of_a_copy_says_where_its_file_is() -> None:
    """Over the pipe to the copier too; and it is the same state as that which a bucket shows."""
    refs = [StateRef("weights", MODEL, "1-4"), StateRef("weights", RUN, "1-4", Shared(MODEL, SOURCE, SINCE))]
    wanted = _wanted(refs, [MODEL, RUN], last=False)
    read = WANTED.validate_json(WANTED.dump_json(wanted))
    assert [each.shared for each in read.states] == [None, SHARED]
    assert read.states[1] == State("weights", storage_id(RUN), "1-4")


def test_a_manifest_that_can_not_be_read_is_no_copys() -> None:
    """Said so, rather than guessed at; that of a state with a file of its own is not looked at."""
    state = copy_of(State("weights", ID, "1-4"))
    with pytest.raises(CopyFailed, match="manifest can not be read"):
        described_as(state, b"{}")
    assert described_as(replace(state, shared=None), b"{}") == b"{}"


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_each_comes_back_without_the_other(
    kind: StateKind, tmp_path: Path, store: Store, secret: Path, prefix: str
) -> None:
    """The source is removed in the storage's list, and then in S3; the copy is what a restore finds."""
    root = Root(tmp_path / "lost")
    source = root.write(kind, 4, name="half")
    copy, data = copy_of(source), root.data(source)
    made = copier(root, bucket(store, secret, f"{prefix}-{kind}"), root.claim(attempt=3))
    work_off(made, source, copy)
    below = f"{prefix}-{kind}/team/tuned"
    for state in (source, copy):
        assert store.content(f"{below}/{directory(state)}/state.safetensors") == data
    told = json.loads(store.content(f"{below}/{directory(copy)}/manifest.json"))
    assert (told["model_id"], told["source"], told["time"], told["name"]) == (RUN, SOURCE, SINCE, "half")
    assert "source" not in json.loads(store.content(f"{below}/{directory(source)}/manifest.json"))
    work_off(made, copy)
    assert not any(f"/{ID}/" in path for path in store.objects(f"{below}/models"))

    new = Root(tmp_path / "new")
    assert restore(new.files, bucket(store, secret, f"{prefix}-{kind}"))
    assert new.data(State(kind, storage_id(RUN), source.key)) == data
    (run,) = read_restored(new.files)
    assert (run.model_id, run.source, [each.name for each in run.checkpoints]) == (RUN, SOURCE, ["half"])
    assert SOURCE in run.explanation
    assert "rolled back" not in run.explanation


def test_a_copy_goes_and_its_source_stays(tmp_path: Path, store: Store, secret: Path, prefix: str) -> None:
    """In S3 as in the list."""
    root = Root(tmp_path / "root")
    source = root.write("weights", 4, name="half")
    made = copier(root, bucket(store, secret, prefix), root.claim())
    work_off(made, source, copy_of(source))
    work_off(made, source)
    assert all(f"/{ID}/" in path for path in store.objects(f"{prefix}/team/tuned/models"))
