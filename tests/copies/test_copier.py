"""Copies in a real S3 server: what is sent, what is never sent twice, and what failures leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everloop_trainer.copies.bucket import Bucket, CopyFailed, Place
from everloop_trainer.copies.copier import AnotherLineage, Copier, Work, directory
from everloop_trainer.copies.protocol import State, Wanted
from everloop_trainer.copies.working import Working
from everloop_trainer.session.errors import Fenced
from everloop_trainer.session.status import CopiesReport
from tests.copies.states import ID, Root, bucket, copier
from tests.copies.store import Request, Store, error

LARGE = 40 << 20
"""Bytes of a state that is sent in three parts."""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.claim()
    return made


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"t-{request.node.name.partition('[')[0]}"


def key(prefix: str, state: State, name: str) -> str:
    return f"{prefix}/team/tuned/{directory(state)}/{name}"


def work_off(made: Copier, *states: State) -> None:
    wanted = Wanted(states, (ID,))
    while todo := made.due(wanted):
        made.do(todo[0])


def test_a_copy_is_the_file_and_its_manifest_comes_last(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """Byte by byte, whatever checksums clients like to add; identity and epoch are there before."""
    state = root.write("weights", 4, name="half")
    work_off(copier(root, bucket(store, secret, prefix), 1), state)
    assert store.content(key(prefix, state, "state.safetensors")) == root.data(state)
    assert json.loads(store.content(key(prefix, state, "manifest.json")))["name"] == "half"
    below = f"PutObject /copies/{prefix}/team/tuned"
    place = f"{below}/{directory(state)}"
    assert store.written() == [
        f"{below}/identity.json",
        f"{below}/epochs/00000001.json",
        f"{place}/state.safetensors",
        f"{place}/manifest.json",
    ]


def test_nothing_is_sent_twice(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """Not by the same copier, not by the next incarnation, and not what a killed one had sent without its manifest."""
    state = root.write("weights", 4, name="half")
    where = bucket(store, secret, prefix)
    work_off(copier(root, where, 1), state)
    store.client().delete_object(Bucket="copies", Key=key(prefix, state, "manifest.json"))
    number = root.claim(attempt=2)
    store.requests.clear()
    second = copier(root, where, number)
    work_off(second, state)
    work_off(second, state)
    sent = [path for path in store.written() if "/models/" in path]
    assert sent == [f"PutObject /copies/{key(prefix, state, 'manifest.json')}"]


def test_old_copies_go_manifest_first(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """A copy is never listed that is not there."""
    old, new = root.write("snapshots", 10), root.write("snapshots", 20)
    made = copier(root, bucket(store, secret, prefix), 1)
    work_off(made, old)
    store.requests.clear()
    work_off(made, new)
    assert store.written()[-2:] == [
        f"DeleteObject /copies/{key(prefix, old, 'manifest.json')}",
        f"DeleteObject /copies/{key(prefix, old, 'state.safetensors')}",
    ]
    assert store.objects(f"{prefix}/team/tuned/models") == [
        key(prefix, new, "manifest.json"),
        key(prefix, new, "state.safetensors"),
    ]


def test_an_upload_that_fails_in_the_middle_leaves_nothing_and_is_done_again(
    root: Root, store: Store, secret: Path, prefix: str
) -> None:
    """The second of three parts fails for longer than a request is repeated; later it does not."""
    state = root.write("weights", 4, size=LARGE, name="half")
    made = copier(root, bucket(store, secret, prefix), 1)

    def fault(request: Request) -> bytes | None:
        return error("InternalError") if "partNumber=2" in request.path else None

    store.fault = fault
    with pytest.raises(CopyFailed, match="InternalError"):
        made.do(Work(state))
    store.fault = None
    assert store.unfinished() == []
    assert not [name for name in store.objects(prefix) if "/models/" in name]
    work_off(made, state)
    assert store.content(key(prefix, state, "state.safetensors")) == root.data(state)
    assert [request.kind for request in store.requests].count("CompleteMultipartUpload") == 1


def test_credentials_that_expire_in_the_middle_of_an_upload_are_read_anew(
    root: Root, store: Store, secret: Path, prefix: str
) -> None:
    """The Secret is rotated while parts are on their way: the next request is signed with what is there then."""
    state = root.write("weights", 4, size=LARGE, name="half")
    made = copier(root, bucket(store, secret, prefix), 1)
    parts = 0

    def fault(request: Request) -> bytes | None:
        nonlocal parts
        if request.kind != "UploadPart":
            return None
        parts += 1
        if parts == 1:
            (secret / "AWS_ACCESS_KEY_ID").write_text("expired")  # its server refuses it from now on
        return None

    store.fault = fault
    with pytest.raises(CopyFailed, match="access key"):
        made.do(Work(state))
    store.credentials(secret)
    store.fault = None
    assert store.unfinished() == [key(prefix, state, "state.safetensors")]  # it could not be removed either
    work_off(made, state)
    assert store.content(key(prefix, state, "state.safetensors")) == root.data(state)
    assert store.unfinished() == []


def test_a_session_token_goes_along(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """Temporary credentials are three values; this server issued no such token, and says so."""
    (secret / "AWS_SESSION_TOKEN").write_text("temporary")
    with pytest.raises(CopyFailed, match="InvalidToken"):
        copier(root, bucket(store, secret, prefix), 1)
    assert {request.headers.get("X-Amz-Security-Token") for request in store.requests} == {"temporary"}


def test_missing_credentials_are_named(root: Root, store: Store, tmp_path: Path, prefix: str) -> None:
    """And nothing else is tried in their place."""
    with pytest.raises(CopyFailed, match="NoCredentialsError"):
        copier(root, bucket(store, tmp_path / "nothing", prefix), 1)
    assert store.requests == []


def test_a_key_of_the_key_service_is_asked_for(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """For data, in parts or not, and manifests."""
    where = bucket(store, secret, prefix, kms_key_id="key-1")
    store.fault = lambda request: error("AccessDenied", 403) if "encryption" not in str(request.headers) else None
    with pytest.raises(CopyFailed):
        copier(root, where, 1)  # listing needs no key: refused by the fault, after the writes
    writes = [request for request in store.requests if request.writes]
    assert all(request.headers.get("X-Amz-Server-Side-Encryption-Aws-Kms-Key-Id") == "key-1" for request in writes)


def test_a_zombie_neither_copies_nor_removes(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """It is fenced in the storage, before it sends anything."""
    old, new = root.write("snapshots", 10), root.write("snapshots", 20)
    zombie = copier(root, bucket(store, secret, prefix), 1)
    work_off(zombie, old)
    root.claim(attempt=2)
    store.requests.clear()
    for work in (Work(new), Work(old, remove=True)):
        with pytest.raises(Fenced):
            zombie.do(work)
    assert store.written() == []


def test_a_zombie_on_storage_that_was_lost_is_fenced_in_s3(
    root: Root, store: Store, secret: Path, prefix: str, tmp_path: Path
) -> None:
    """Its own storage tells it nothing of the newcomer, which has another."""
    state = root.write("snapshots", 10)
    where = bucket(store, secret, prefix)
    zombie = copier(root, where, 1)
    other = Root(tmp_path / "other")
    for name in ("identity.json", "epochs/00000001.json"):
        other.files.create(name, (root.path / name).read_bytes())
    copier(other, where, other.claim(attempt=2))
    store.requests.clear()
    with pytest.raises(Fenced, match="00000002"):
        zombie.do(Work(state))
    assert store.written() == []


def test_a_zombie_that_is_stopped_before_the_manifest_never_writes_it(
    root: Root, store: Store, secret: Path, prefix: str
) -> None:
    """The epoch is read again after the data."""
    state = root.write("weights", 4, name="half")
    zombie = copier(root, bucket(store, secret, prefix), 1)

    def fault(request: Request) -> None:
        if request.kind == "PutObject" and "state.safetensors" in request.path:
            root.claim(attempt=2)

    store.fault = fault
    with pytest.raises(Fenced):
        zombie.do(Work(state))
    assert not [path for path in store.written() if path.endswith("manifest.json")]


def test_copies_of_another_session_are_not_touched(
    root: Root, store: Store, secret: Path, prefix: str, tmp_path: Path
) -> None:
    """One of the same name, in another cluster perhaps: its lineage differs."""
    where = bucket(store, secret, prefix)
    copier(root, where, 1)
    stranger = Root(tmp_path / "stranger")
    stranger.claim()
    store.requests.clear()
    with pytest.raises(AnotherLineage, match="another session"):
        copier(stranger, where, 1)
    assert store.written() == []


def test_a_damaged_state_is_not_copied(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """A copy that can not be restored is none."""
    state = root.write("weights", 4, name="half")
    (root.path / directory(state) / "state.safetensors").write_bytes(b"else")
    with pytest.raises(CopyFailed, match="damaged"):
        copier(root, bucket(store, secret, prefix), 1).do(Work(state))
    assert not [name for name in store.objects(prefix) if "/models/" in name]


def test_a_snapshot_that_is_superseded_meanwhile_is_no_failure(
    root: Root, store: Store, secret: Path, prefix: str
) -> None:
    """The storage keeps two; the copier may be slower than that."""
    made = copier(root, bucket(store, secret, prefix), 1)
    made.do(Work(State("snapshots", ID, "1-10")))
    assert made.pending(Wanted()) == 0


def test_what_fails_does_not_keep_the_rest_waiting(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """It is told of, tried again after the others, and the report is clear again once it is done."""
    damaged, good = root.write("weights", 4, name="half"), root.write("weights", 8, name="all")
    path = root.path / directory(damaged) / "state.safetensors"
    intact = path.read_bytes()
    path.write_bytes(b"else")
    told: list[CopiesReport] = []
    working = Working(Copier(root.files, bucket(store, secret, prefix), 1, 0, lambda: 0.0), told.append)
    wanted = Wanted((damaged, good), (ID,))
    assert working.step(wanted) > 0
    assert "damaged" in told[-1].error
    assert working.step(wanted) == 0
    assert (told[-1].pending, bool(told[-1].error), bool(told[-1].last_time)) == (1, True, True)
    path.write_bytes(intact)
    working.step(wanted)
    assert (told[-1].pending, told[-1].error) == (0, "")


def test_nothing_is_put_off_when_the_pod_ends(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """A snapshot that would have had to wait is copied; it is told when that is all."""
    told: list[CopiesReport] = []
    where = bucket(store, secret, prefix)
    working = Working(Copier(root.files, where, 1, 3600, lambda: 0.0), told.append)
    first, second = root.write("snapshots", 4), root.write("snapshots", 8)
    working.step(Wanted((first,), (ID,)))
    wanted = Wanted((second,), (ID,))
    working.step(wanted)
    assert (told[-1].pending, where.get(f"{directory(second)}/manifest.json")) == (0, None)
    working.step(Wanted((second,), (ID,), last=True))
    assert where.get(f"{directory(second)}/manifest.json") is not None
    assert (told[-1].pending, told[-1].finished) == (0, True)


def test_what_fails_when_the_pod_ends_is_tried_once(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """Also if it has failed before; the rest is copied, and the pod does not stay for it."""
    damaged, good = root.write("weights", 4, name="half"), root.write("weights", 8, name="all")
    path = root.path / directory(damaged) / "state.safetensors"
    intact = path.read_bytes()
    path.write_bytes(b"else")
    told: list[CopiesReport] = []
    working = Working(Copier(root.files, bucket(store, secret, prefix), 1, 0, lambda: 0.0), told.append)
    working.step(Wanted((damaged,), (ID,)))
    wanted = Wanted((damaged, good), (ID,), last=True)
    working.step(wanted)
    assert not told[-1].finished
    working.step(wanted)
    assert (told[-1].pending, told[-1].finished, "damaged" in told[-1].error) == (1, True, True)
    path.write_bytes(intact)
    working.step(wanted)
    assert (told[-1].pending, told[-1].finished, told[-1].error) == (0, True, "")


def test_a_replaced_pod_copies_nothing_at_its_end(root: Root, store: Store, secret: Path, prefix: str) -> None:
    """The fence is read then as ever."""
    state = root.write("snapshots", 4)
    working = Working(Copier(root.files, bucket(store, secret, prefix), 1, 0, lambda: 0.0), lambda _: None)
    working.step(Wanted())
    root.claim(attempt=2)
    with pytest.raises(Fenced):
        working.step(Wanted((state,), (ID,), last=True))
    assert not [name for name in store.objects(prefix) if "/models/" in name]


def test_an_address_that_is_none_is_refused() -> None:
    """By name of the field."""
    with pytest.raises(CopyFailed, match=r"copies\.s3\.uri"):
        Bucket(Place("https://bucket"), "team/tuned")
