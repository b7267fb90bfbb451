"""Makes the copies: works off the difference between what is wanted and what is there, one state at a time.

Before anything that others can see, the epoch is read: in the storage, and in S3, where it also counts if the storage
was lost. So a server that was replaced neither copies nor deletes any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import structlog

from everloop_trainer.copies.bucket import Bucket, CopyFailed
from everloop_trainer.copies.protocol import State, Wanted
from everloop_trainer.session.errors import Fenced
from everloop_trainer.store import layout
from everloop_trainer.store.epochs import read_fence
from everloop_trainer.store.files import Files
from everloop_trainer.store.states import manifest_from_json, manifest_to_json

log = structlog.get_logger(__name__)


class AnotherLineage(CopyFailed):
    """Another session's copies are there; nothing of them is touched."""


def directory(state: State) -> str:
    """Where a state lies, below the session's root and below the prefix alike."""
    return layout.state(state.model, state.kind, state.key)


def origin_of(state: State) -> State:
    """Where below the session's root its data lies. Pure."""
    return state if state.shared is None else State(state.kind, state.shared.holder, state.key)


def described_as(state: State, manifest: bytes) -> bytes:
    """The manifest of a copy of a state, from that of its data. Pure. Raises CopyFailed if it can't be read."""
    shared = state.shared
    if shared is None:
        return manifest
    found = manifest_from_json(manifest, state.key, directory(state))
    if found is None:
        raise CopyFailed(f"{directory(origin_of(state))}: its manifest can not be read, and it is not copied")
    named = replace(found, model=shared.model_id, source=shared.source, time=shared.time, ttl_seconds=None)
    return manifest_to_json(named)


def state_of(path: str) -> State | None:
    """The state that an object belongs to; None if it is none's."""
    match path.split("/"):
        case ["models", model, "snapshots", key, _]:
            return State("snapshots", model, key)
        case ["models", model, "checkpoints", kind, key, _]:
            return State(kind, model, key)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done: copy one state, or remove the copy of one."""

    state: State
    remove: bool = False


def due(
    wanted: Wanted,
    present: Iterable[State],
    leftovers: Iterable[State],
    taken: Mapping[str, float],
    pause: float,
    now: float,
) -> list[Work]:
    """What there is to do, in order. Pure.

    A copied snapshot is removed once there is a newer one, and a checkpoint once it is not wanted any more. Of a model
    that is not known nothing is removed: its history may be lost.

    Args:
        wanted: what is to have a copy.
        present: what has one.
        leftovers: copies that were begun and never ended.
        taken: by model: when its last snapshot was copied.
        pause: seconds between the copies of two snapshots of a model.
        now: on the clock of `taken`.
    """
    there, want = set(present), set(wanted.states)
    copies = [
        Work(state)
        for state in wanted.states
        if state not in there
        and (state.kind != "snapshots" or state.model not in taken or now - taken[state.model] >= pause)
    ]
    covered = {state.model for state in want & there if state.kind == "snapshots"}
    removals = [
        Work(state, remove=True)
        for state in sorted((there | set(leftovers)) - want, key=directory)
        if state.model in wanted.models and (state.kind != "snapshots" or state.model in covered)
    ]
    return copies + removals


class Copier:
    """One incarnation's view of the copies. Not for several threads.

    Args:
        files: the session's root.
        bucket: the session's prefix.
        number: the incarnation.
        pause: seconds between the copies of two snapshots of a model.
        monotonic: a clock in seconds.
    """

    def __init__(self, files: Files, bucket: Bucket, number: int, pause: float, monotonic: Callable[[], float]) -> None:
        self._files = files
        self._bucket = bucket
        self._number = number
        self._pause = pause
        self._monotonic = monotonic
        self._present: set[State] = set()
        self._leftovers: set[State] = set()
        self._taken: dict[str, float] = {}
        self.begun = False
        self.last_time = ""

    def begin(self) -> None:
        """Claims the prefix for this incarnation, and finds out what is there.

        Raises:
            Fenced: a newer incarnation has claimed it.
            AnotherLineage: it belongs to another session.
            CopyFailed, OSError: it could not be found out.
        """
        with self._files.open_read(layout.IDENTITY) as file:
            identity = file.read()
        found = self._bucket.get(layout.IDENTITY)
        if found is not None and lineage_of(found) != lineage_of(identity):
            raise AnotherLineage(f"{self._bucket.uri} holds the copies of another session: lineage {lineage_of(found)}")
        self._fence()
        if found is None:
            self._bucket.put(layout.IDENTITY, identity)
        epoch = layout.epoch(self._number)
        with self._files.open_read(epoch) as file:
            self._bucket.put(epoch, file.read())
        aborted = self._bucket.abort_uploads()
        if aborted:
            log.info("unfinished uploads removed", count=aborted)
        objects = [(path, state) for path in self._bucket.list("models/") if (state := state_of(path))]
        self._present = {state for path, state in objects if path.endswith(f"/{layout.MANIFEST}")}
        self._leftovers = {state for _, state in objects} - self._present
        self.begun = True

    def due(self, wanted: Wanted) -> list[Work]:
        """What there is to do now, in order."""
        pause = 0.0 if wanted.last else self._pause
        return due(wanted, self._present, self._leftovers, self._taken, pause, self._monotonic())

    def pending(self, wanted: Wanted) -> int:
        """How many states that are to have a copy now have none; all, as long as nothing is known."""
        if not self.begun:
            return len(wanted.states)
        return sum(not work.remove for work in self.due(wanted))

    def do(self, work: Work) -> None:
        """One piece of work. Raises Fenced, CopyFailed, OSError."""
        if work.remove:
            self._remove(work.state)
        else:
            self._copy(work.state)

    def _copy(self, state: State) -> None:
        place, origin = directory(state), directory(origin_of(state))
        try:
            with self._files.open_read(f"{origin}/{layout.MANIFEST}") as file:
                manifest = described_as(state, file.read())
            described = json.loads(manifest)["file"]
            if self._files.sha256(f"{origin}/{layout.STATE}") != (described["sha256"], described["bytes"]):
                raise CopyFailed(f"{origin}: is damaged in the storage, and not copied")
            self._upload(origin, place, described["sha256"], described["bytes"])
        except FileNotFoundError:
            log.info("state superseded before it was copied", path=place)
            self._taken.pop(state.model, None)
            return
        self._fence()
        self._bucket.put(f"{place}/{layout.MANIFEST}", manifest)
        self._present.add(state)
        self._leftovers.discard(state)
        if state.kind == "snapshots":
            self._taken[state.model] = self._monotonic()
        self.last_time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        log.info("copied", path=place, bytes=described["bytes"])

    def _upload(self, origin: str, place: str, sha256: str, size: int) -> None:
        path = f"{place}/{layout.STATE}"
        if self._bucket.stored(path) == (sha256, size):
            return
        self._fence()
        self._bucket.abort_uploads(path)  # what an earlier try could not remove: its credentials had expired
        self._bucket.upload(self._files.absolute(f"{origin}/{layout.STATE}"), path, sha256)
        if self._bucket.stored(path) != (sha256, size):
            raise CopyFailed(f"{self._bucket.uri}{path}: is not what was sent")

    def _remove(self, state: State) -> None:
        self._fence()
        self._bucket.delete(f"{directory(state)}/{layout.MANIFEST}")
        self._bucket.delete(f"{directory(state)}/{layout.STATE}")
        self._present.discard(state)
        self._leftovers.discard(state)
        log.info("old copy removed", path=directory(state))

    def _fence(self) -> None:
        read_fence(self._files, self._number)
        own = layout.epoch(self._number)
        newer = next(self._bucket.list(f"{layout.EPOCHS}/", after=own), None)
        if newer is not None:
            raise Fenced(f"incarnation {self._number} is superseded in {self._bucket.uri} by {newer}")


def lineage_of(identity: bytes) -> str:
    """What a session's identity says of which one it is. Raises CopyFailed if it is none."""
    try:
        return str(json.loads(identity)["lineage"])
    except (ValueError, KeyError, TypeError) as error:
        raise CopyFailed(f"{layout.IDENTITY}: {error}") from error
