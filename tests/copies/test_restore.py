"""An empty storage is filled from the copies of the lost one, whoever is killed in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from everloop_trainer.copies.bucket import CopyFailed
from everloop_trainer.copies.copier import directory
from everloop_trainer.copies.protocol import State, Wanted
from everloop_trainer.copies.restore import restore
from everloop_trainer.store.epochs import newest_epoch
from everloop_trainer.store.restored import read_restored
from tests.copies.states import ID, MODEL, Root, bucket, copier
from tests.copies.store import Request, Store, error

OTHER = MODEL.replace(":0", ":1")


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"r-{request.node.name.partition('[')[0]}"


@pytest.fixture
def lost(tmp_path: Path, store: Store, secret: Path, prefix: str) -> dict[State, bytes]:
    """What the storage that is lost had copied: by state, its data."""
    root = Root(tmp_path / "lost")
    number = root.claim(attempt=3)
    states = [
        root.write("weights", 4, name="half"),
        root.write("sampler_weights", 6, name="thin"),
        root.write("snapshots", 20),
        root.write("snapshots", 2, model=OTHER),
    ]
    made = copier(root, bucket(store, secret, prefix), number)
    wanted = Wanted(tuple(states), (ID,))
    while todo := made.due(wanted):
        made.do(todo[0])
    store.requests.clear()
    return {state: root.data(state) for state in states}


def test_everything_comes_back_and_each_model_says_how_far(
    lost: dict[State, bytes], tmp_path: Path, store: Store, secret: Path, prefix: str
) -> None:
    """Checkpoints as they were, snapshots as checkpoints, identity and epoch; nothing is written to S3."""
    root = Root(tmp_path / "new")
    assert restore(root.files, bucket(store, secret, prefix))
    assert store.written() == []
    for state, data in lost.items():
        kind = "weights" if state.kind == "snapshots" else state.kind
        assert root.data(State(kind, state.model, state.key)) == data
    first, second = sorted(read_restored(root.files), key=lambda model: model.model_id)
    assert (first.number, first.step, first.resume) == (20, 10, f"tinker://{MODEL}/weights/restored-10")
    assert [each.name for each in first.checkpoints] == ["half", "thin", "restored-10"]
    assert second.resume == f"tinker://{OTHER}/weights/restored-1"
    assert (root.path / "identity.json").read_bytes() == (tmp_path / "lost" / "identity.json").read_bytes()
    epoch = newest_epoch(root.files)
    assert epoch is not None
    assert (epoch.number, epoch.attempt) == (1, 3)
    assert root.claim(attempt=4) == 2


def test_a_restore_that_breaks_off_is_begun_again(
    lost: dict[State, bytes], tmp_path: Path, store: Store, secret: Path, prefix: str
) -> None:
    """At every single answer of S3: until the end there is no identity, and the next try makes it whole."""
    root = Root(tmp_path / "new")
    breaks = seen = 0

    def fault(request: Request) -> bytes | None:
        nonlocal seen
        seen += 1
        return error("AccessDenied", 403) if seen == breaks else None

    while not (root.path / "identity.json").exists():
        seen, breaks = 0, breaks + 1
        store.fault = fault
        try:
            restore(root.files, bucket(store, secret, prefix))
        except CopyFailed:
            assert not (root.path / "identity.json").exists()
    assert breaks > 10
    assert len(read_restored(root.files)) == 2
    assert not list(root.path.rglob(".tmp-*"))
    assert root.data(State("weights", ID, "1-20")) == lost[State("snapshots", ID, "1-20")]


def test_a_copy_that_is_not_what_its_manifest_says_is_left_out(
    lost: dict[State, bytes], tmp_path: Path, store: Store, secret: Path, prefix: str
) -> None:
    """The model goes back to the one before it; nothing damaged is listed."""
    snapshot = State("snapshots", ID, "1-20")
    key = f"{prefix}/team/tuned/{directory(snapshot)}/state.safetensors"
    store.client().put_object(Bucket="copies", Key=key, Body=b"else", Metadata={"sha256": "0" * 64})
    root = Root(tmp_path / "new")
    restore(root.files, bucket(store, secret, prefix))
    [first] = [model for model in read_restored(root.files) if model.model_id == MODEL]
    assert first.resume == f"tinker://{MODEL}/weights/half"
    assert not (root.path / directory(State("weights", ID, "1-20"))).exists()


def test_without_copies_the_storage_begins_anew(tmp_path: Path, store: Store, secret: Path, prefix: str) -> None:
    """A new session has none."""
    root = Root(tmp_path / "new")
    assert not restore(root.files, bucket(store, secret, prefix))
    assert not (root.path / "identity.json").exists()


def test_copies_that_can_not_be_read_are_no_beginning(
    lost: dict[State, bytes], tmp_path: Path, store: Store, secret: Path, prefix: str
) -> None:
    """Whether there are any is not known then."""
    store.fault = lambda _: error("AccessDenied", 403)
    with pytest.raises(CopyFailed, match="AccessDenied"):
        restore(Root(tmp_path / "new").files, bucket(store, secret, prefix))
