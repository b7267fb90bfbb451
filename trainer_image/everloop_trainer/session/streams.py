"""Streams of numbered operations: what was accepted, what may run next, what has ended. Pure bookkeeping.

A model's stream is ordered: one operation at a time, in number order from its creation (0) on; what arrives early
waits. A sampling session's stream is unordered: its operations run as they were accepted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from everloop_trainer.session.identifiers import is_model, request_id
from everloop_trainer.session.numbers import Numbers
from everloop_trainer.session.operations import Arguments, Sample
from everloop_trainer.session.poison import UNTRIED, Tries
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Result


@dataclass(frozen=True, slots=True)
class Ended:
    """How an operation ended, and the position of the record whose body is the result."""

    result: Result
    position: Position


@dataclass(slots=True)
class Entry:
    """One accepted operation. `durable` once its accept record was flushed and the fence read."""

    stream: str
    seq: int
    args: Arguments
    accepted: Position
    durable: bool
    ended: Ended | None = None
    delivered: Position | None = None
    tries: Tries = UNTRIED

    @property
    def request_id(self) -> str:
        """The id that the client polls."""
        return request_id(self.stream, self.seq)

    @property
    def given_up(self) -> bool:
        """Whether it never arrived: one record says so, and is both its acceptance and its result."""
        return self.ended is not None and self.ended.position == self.accepted


@dataclass(frozen=True, slots=True)
class Owed:
    """Results that are in a base and nowhere else: numbers, ascending, and the offset in it of each one's record."""

    base: str = ""
    numbers: array[int] = field(default_factory=lambda: array("Q"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))

    def find(self, seq: int) -> int | None:
        """The offset of a number's result."""
        index = bisect_left(self.numbers, seq)
        return self.offsets[index] if index < len(self.numbers) and self.numbers[index] == seq else None


@dataclass(slots=True)
class Stream:
    """The operations of one model or sampling session.

    Attributes:
        entries: accepted operations by number: those without a result, and those that may be asked for again by the
            session itself, which of a model are all from `floor` on that a replay has to know.
        pending: those without a result, in the order of their acceptance.
        done: in an ordered stream, every number below this one has ended.
        floor: of a model, the oldest number from which it can be restored.
        owed: results of operations that are no entries any more.
        gone: numbers that ended, and whose results are not kept any more.
        fetched: numbers whose results were handed out, and are not gone.
        closed: whether nothing runs in it, since its model ended with the storage that it was on, or since it holds the
            copy of a checkpoint: all that comes fails, in any order.
    """

    name: str
    entries: dict[int, Entry] = field(default_factory=dict)
    pending: dict[int, Entry] = field(default_factory=dict)
    done: int = 0
    floor: int = 0
    owed: Owed = field(default_factory=Owed)
    gone: Numbers = field(default_factory=Numbers)
    fetched: Numbers = field(default_factory=Numbers)
    closed: bool = False

    @property
    def ordered(self) -> bool:
        """Whether operations run in number order."""
        return is_model(self.name) and not self.closed

    def knows(self, seq: int) -> bool:
        """Whether a number was taken before: accepted, or given up."""
        return seq in self.entries or self.owed.find(seq) is not None or seq in self.gone

    def accept(self, entry: Entry) -> None:
        """Take in an operation. Raises ValueError if its number was taken before."""
        if self.knows(entry.seq):
            raise ValueError(f"{entry.request_id} was accepted twice")
        self.entries[entry.seq] = entry
        self.pending[entry.seq] = entry

    def ready(self) -> Entry | None:
        """The operation that runs next, or None if none may."""
        entry = self.pending.get(self.done) if self.ordered else next(iter(self.pending.values()), None)
        return entry if entry is not None and entry.durable else None

    def runnable(self) -> list[Entry]:
        """Every operation that might run next: one at most of an ordered stream."""
        pending = [self.pending.get(self.done)] if self.ordered else list(self.pending.values())
        return [entry for entry in pending if entry is not None and entry.durable]

    def before(self, position: Position) -> int:
        """How many pending operations were accepted before that. Each poll that ends asks, of thousands at a time."""
        return bisect_left(list(self.pending.values()), position, key=lambda entry: entry.accepted)

    def missing(self) -> int | None:
        """The number that pending operations of an ordered stream wait for because it was not accepted yet."""
        return self.done if self.ordered and self.pending and self.done not in self.pending else None

    def end(self, seq: int, ended: Ended) -> Entry:
        """Take in a result. Raises ValueError if the operation was not the one to end."""
        entry = self.pending.pop(seq, None)
        if entry is None:
            raise ValueError(f"{request_id(self.name, seq)} has a result but was not pending")
        if self.ordered:
            if seq != self.done:
                raise ValueError(f"{entry.request_id} ended before number {self.done} of its stream")
            self.done = seq + 1
        entry.ended = ended
        if isinstance(entry.args, Sample):
            # These are long, and nothing asks for them again.
            entry.args = replace(entry.args, prompt=(), target_prompt_logprobs=None)
        return entry

    def lose(self, entry: Entry) -> None:
        """Take in a number that never arrived. Raises ValueError if it was not its turn, or if it was accepted."""
        if not self.ordered or entry.seq != self.done or self.knows(entry.seq):
            raise ValueError(f"{entry.request_id} was given up but was not missing")
        self.entries[entry.seq] = entry
        self.done = entry.seq + 1

    def finished(self, after: int = -1) -> Iterator[Entry]:
        """The ended operations that an ordered stream still knows, from `floor` on and above `after`, in order."""
        known = (self.entries.get(seq) for seq in range(max(after + 1, self.floor), self.done))
        return (entry for entry in known if entry is not None)
