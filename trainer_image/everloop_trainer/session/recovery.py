"""How a model comes back: from which stored state, and which operations run again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everloop_trainer.session.operations import ForwardBackward, OptimStep
from everloop_trainer.session.ports import Manifest
from everloop_trainer.session.streams import Entry, Stream


@dataclass(frozen=True, slots=True)
class Plan:
    """Start from `base` (None: a fresh adapter), then run `replay` in order."""

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


def usable(stream: Stream, snapshots: Iterable[Manifest]) -> list[Manifest]:
    """The snapshots that the history covers, newest state first.

    A snapshot of an operation without a result would make that operation count twice, so it is none.
    """
    covered = [snapshot for snapshot in snapshots if snapshot.seq < stream.done]
    return sorted(covered, key=lambda snapshot: (snapshot.seq, snapshot.stands_on), reverse=True)


def plans(stream: Stream, snapshots: Sequence[Manifest]) -> list[Plan]:
    """Ways to bring a model back, best first: each leads to the same state, the last needs no snapshot at all."""
    return [
        Plan(base, tuple(entry for entry in stream.finished(after=base.seq if base else 0) if changes_state(entry)))
        for base in [*usable(stream, snapshots), None]
    ]
