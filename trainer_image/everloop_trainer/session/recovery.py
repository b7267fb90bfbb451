"""How a model comes back: from which stored state, and which operations run again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everloop_trainer.session.operations import ForwardBackward, LoadWeights, OptimStep
from everloop_trainer.session.ports import Manifest, Position
from everloop_trainer.session.streams import Entry, Stream

SPARED = 2
"""Snapshots from which a model can be restored that it keeps, if it has them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Start from `base` (None: a fresh adapter, as `create_model` made it), then run `replay` in order."""

    base: Manifest | None
    replay: tuple[Entry, ...]

    @property
    def resumed_from(self) -> int:
        """Number of the last operation inside the base."""
        return 0 if self.base is None else self.base.seq


def changes_state(entry: Entry) -> bool:
    """Whether a finished operation changed the model: only these are replayed."""
    if entry.ended is None:
        return False
    match entry.args:
        case ForwardBackward(forward_only=forward_only):
            return entry.ended.result.ok and not forward_only
        case OptimStep():
            return entry.ended.result.ok or entry.ended.result.gradients_dropped
        case _:
            return False


def matters(entry: Entry) -> bool:
    """Whether a finished operation has to be known to restore its model: it changed it, or loaded it or tried to."""
    return changes_state(entry) or isinstance(entry.args, LoadWeights)


def stands_on(entry: Entry, history_entries: dict[int, Entry]) -> Position:
    """The newest record that the state before a model's operation follows from."""
    before = history_entries.get(entry.seq - 1)
    if before is None or before.ended is None:
        return entry.accepted
    return max(entry.accepted, before.ended.position)


def last_load(stream: Stream) -> Entry | None:
    """The newest load_weights from the stream's floor on that succeeded: nothing before it is in the model any more."""
    loads = (
        entry
        for entry in stream.finished()
        if isinstance(entry.args, LoadWeights) and entry.ended is not None and entry.ended.result.ok
    )
    return max(loads, key=lambda entry: entry.seq, default=None)


def usable(stream: Stream, snapshots: Iterable[Manifest], since: int = 0) -> list[Manifest]:
    """The snapshots that the history covers, from its floor on, and that hold operation `since`, newest state first.

    A snapshot of an operation without a result would make that operation count twice, so it is none; nor is one that
    a load wrote which failed after all.
    """
    covered = [
        snapshot
        for snapshot in snapshots
        if max(since, stream.floor) <= snapshot.seq < stream.done and not _failed_load(stream.entries.get(snapshot.seq))
    ]
    return sorted(covered, key=lambda snapshot: (snapshot.seq, snapshot.stands_on), reverse=True)


def _failed_load(entry: Entry | None) -> bool:
    return (
        entry is not None
        and isinstance(entry.args, LoadWeights)
        and entry.ended is not None
        and not entry.ended.result.ok
    )


def retained(stream: Stream, root: str | None, snapshots: Sequence[Manifest]) -> set[str]:
    """Keys of the snapshots that stay: the newest of those that a model can be restored from, and `root`.

    Should the newest not be readable, another serves. One of a load that is still under way stays, and takes no place.
    """
    newest = usable(stream, snapshots)[:SPARED]
    to_come = [snapshot for snapshot in snapshots if snapshot.seq >= stream.done]
    return {snapshot.key for snapshot in (*newest, *to_come)} | ({root} if root is not None else set())


def plans(stream: Stream, snapshots: Sequence[Manifest]) -> list[Plan]:
    """Ways to bring a model back, best first: each leads to the same state, the last needs no snapshot at all.

    Except after a load: what it read may be gone, so a loaded model comes back from a snapshot only; and where the
    history is compacted, because what came before the floor is in the snapshots only.
    """
    load = last_load(stream)
    bases = usable(stream, snapshots, since=load.seq if load is not None else 0)
    return [
        Plan(base, tuple(entry for entry in stream.finished(after=base.seq if base else 0) if changes_state(entry)))
        for base in ([*bases, None] if load is None and stream.floor == 0 else bases)
    ]
