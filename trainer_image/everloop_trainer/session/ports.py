"""What the session needs from outside, as protocols: an engine and where to get one, the journal, stored model states.

Paths given to an engine are absolute; it writes large files itself and answers with their hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from everloop_trainer.about import ALPHA as ALPHA
from everloop_trainer.about import About as About
from everloop_trainer.session.lora import Lora as Lora
from everloop_trainer.session.operations import OptimStep, Sample
from everloop_trainer.session.records import Record
from everloop_trainer.session.status import BaseModel, CopiesReport
from everloop_trainer.session.usage import Usage as Usage

Parts = Literal["all", "weights"]
StateKind = Literal["snapshots", "weights", "sampler_weights", "external_weights"]
"""A snapshot is internal; the others are the kinds of checkpoints. What is of the last kind is read by nobody here."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that an engine wrote and flushed: lower-case hex SHA-256 and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """A stored adapter to sample from."""

    path: str
    sha256: str
    lora: Lora


@dataclass(frozen=True, slots=True)
class Room:
    """What a new adapter needs with optimizer and gradients, and what an engine has left; bytes.

    `of` says for people whose limit `total` is; `free` may be negative.
    """

    parameters: int
    needed: int
    free: int
    total: int
    of: str


@dataclass(frozen=True, slots=True)
class Computed:
    """A protobuf answer, and what it took."""

    body: bytes
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Stepped:
    """Metrics of an optimizer step, and what it took."""

    metrics: dict[str, float]
    usage: Usage = field(default_factory=Usage)


class Engine(Protocol):
    """One engine process. Any method raises ConnectionError or EOFError once the engine is lost.

    Methods that compute raise EngineRefused for bad content (category `user`) or a failure that left the state as it
    was (category `server`). `model` is a model id and opaque to the engine.
    """

    @property
    def pid(self) -> int:
        """Process id, for the journal and for people."""

    async def room(self, lora: Lora) -> Room:
        """Whether another adapter of this shape would fit, in numbers."""

    async def init(self, model: str, lora: Lora) -> None:
        """Make a fresh adapter; replaces one of that name."""

    async def restore(self, model: str, path: str, lora: Lora, sha256: str, parts: Parts) -> None:
        """Load an adapter, with `all` also its optimizer, step and accumulated gradients; replaces one of that name.

        Raises EngineRefused if the file is missing or has another hash.
        """

    async def load(self, model: str, path: str, lora: Lora, sha256: str, optimizer: bool) -> None:
        """Begin a model with what a checkpoint holds: its weights, and its optimizer or a fresh one.

        No gradients are outstanding and no operation was applied; replaces a model of that name. Raises EngineRefused
        if the file is missing, has another hash, or holds no optimizer where it is asked for.
        """

    async def drop(self, model: str) -> None:
        """Forget an adapter."""

    async def forward_backward(self, model: str, seq: int, forward_only: bool, body: bytes) -> Computed:
        """Run a protobuf ForwardBackwardRequest and return the protobuf ForwardBackwardOutput."""

    async def optim_step(self, model: str, seq: int, step: OptimStep) -> Stepped:
        """Apply the accumulated gradients and return metrics."""

    async def drop_gradients(self, model: str, seq: int) -> None:
        """Clear the accumulated gradients."""

    async def write(
        self,
        model: str,
        seq: int,
        path: str,
        parts: Parts,
        about: About | None = None,
        recipients: Sequence[str] = (),
    ) -> Written:
        """Write the state to a new file and flush it.

        With `about`, weights get beside them what makes their directory a PEFT adapter; with `recipients` as well,
        all of it is encrypted for them.
        """

    async def snapshot(self, model: str, seq: int, path: str) -> Awaitable[Written]:
        """Copy the state at this boundary and return at once.

        The awaitable ends when the file is written and flushed; it raises EngineRefused if that failed, or
        ConnectionError/EOFError if the engine was lost first.
        """

    async def sample(self, weights: FrozenWeights | None, sample: Sample, key: str, prompt: bytes = b"") -> Computed:
        """Sample from stored weights or, with None, from the base model; returns a protobuf SampleResponse.

        `prompt` is the body of an operation that has its prompt there. Those of different keys take turns at the places
        that the engine has. If it is cancelled, the engine lets go of the sample.
        """

    async def wait_lost(self) -> None:
        """Return when the engine is gone."""

    async def close(self) -> None:
        """Let go of the engine, which then exits. Never raises."""


class EngineSource(Protocol):
    """Where engines come from."""

    async def connect(self) -> Engine:
        """A new engine, ready to work. Raises OSError (ConnectionError is one) or EOFError while there is none."""


class Position(NamedTuple):
    """Where a record lies; positions order all records of the history."""

    incarnation: int
    offset: int


class Journal(Protocol):
    """The append-only journal of this incarnation, and the sealed history before it.

    Every method raises Fenced once a newer incarnation was seen and StorageFailed after any failed write.
    """

    def append(self, record: Record, body: bytes = b"") -> tuple[Position, asyncio.Future[None]]:
        """Add a record; the future ends when it is flushed and the fence was read after that.

        The future is shared: await it through `asyncio.shield`.
        """

    def note(self, record: Record) -> tuple[Position, asyncio.Future[None]]:
        """Add a record that may be lost with the machine; the future ends when the operating system has it."""

    async def read(self, position: Position) -> bytes:
        """The body of a record.

        Raises Replaced if the record was compacted, JournalDamaged if it cannot be read back as it was written.
        """

    async def read_kept(self, base: str, offset: int) -> tuple[Record, bytes]:
        """A result of a base, and its body. Raises Replaced if a newer base holds it now, JournalDamaged."""

    async def check_fence(self) -> None:
        """Read the fence: to be awaited before every effect that the outside sees."""

    @property
    def trouble(self) -> str:
        """Why nothing can be made durable just now, for people; empty if it can."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a state goes: its key, unique within the model and kind, and the absolute path for the engine."""

    key: str
    path: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a stored state is. It is written after the data, and without it the data does not count.

    Attributes:
        kind: snapshot or kind of checkpoint.
        key: name of the directory of the state.
        model: model id.
        operation: request id of the last operation whose effect is inside, or that saved it.
        seq: number of that operation; `step` counts optimizer steps.
        stands_on: the newest record that the state follows from; a manifest counts only if the history holds it.
        time: RFC 3339.
        source: tinker path of the checkpoint of which it is a copy: only where copies in S3 say so.
    """

    kind: StateKind
    key: str
    model: str
    operation: str
    seq: int
    step: int
    stands_on: Position
    base_model: BaseModel
    lora: Lora
    alpha: int
    sha256: str
    size: int
    time: str
    name: str | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, object] | None = None
    source: str | None = None


class States(Protocol):
    """Stored model states. Raises StorageFailed where the storage fails."""

    def place(self, kind: StateKind, model: str, seq: int, generation: int) -> Place:
        """A place of its own for the state that the `generation`-th engine of this incarnation writes."""

    async def commit(self, manifest: Manifest) -> None:
        """Read the fence, then write the manifest: from now on the state counts."""

    async def snapshots(self, model: str) -> list[Manifest]:
        """Snapshots that count, newest first; the engine that loads one verifies its data."""

    async def intact(self, manifest: Manifest) -> bool:
        """Whether the data of a stored state is there as its manifest says."""

    async def find(self, kind: StateKind, model: str, operation: str) -> Manifest | None:
        """The intact checkpoint that an earlier try of this operation stored, if any."""

    async def holds(self, kind: StateKind, model: str, key: str, written: Written) -> bool:
        """Whether a state's data file is there and is what was written."""

    async def retain(self, model: str, choose: Callable[[Sequence[Manifest]], Collection[str]]) -> None:
        """Read the fence, then delete all snapshots but those whose keys are chosen among what `snapshots` gives.

        What this incarnation is still writing stays too.
        """

    async def keys(self, kind: StateKind, model: str) -> list[tuple[str, int, int]]:
        """Every state there is, whether it counts or not: its key, the incarnation that wrote it, and its number."""

    async def delete(self, kind: StateKind, model: str, key: str) -> None:
        """Read the fence, then delete a state."""

    def path(self, kind: StateKind, model: str, key: str) -> str:
        """Absolute path of a state's data file, for the engine."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Of a checkpoint without a file of its own: the model below which that lies, of what it is a copy, since when."""

    holder: str
    source: str
    time: str


@dataclass(frozen=True, slots=True)
class StateRef:
    """A stored state that is to have a copy."""

    kind: StateKind
    model: str
    key: str
    shared: Shared | None = None


class Copies(Protocol):
    """What copies stored states elsewhere. Nothing waits for it, and it never fails."""

    async def run(self) -> None:
        """Copy, until cancelled."""

    def want(self, states: Sequence[StateRef], models: Collection[str]) -> None:
        """From now on these are to have a copy; of `models`, which are all that are known, nothing else."""

    async def finish(self, states: Sequence[StateRef], models: Collection[str]) -> None:
        """The same for the last time: ends once each of them has a copy, or could not be copied."""

    @property
    def report(self) -> CopiesReport:
        """How far it is."""
