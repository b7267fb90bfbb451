"""A session over a disk in memory and fake engines, started and started again; and a client that never forgets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from everloop_trainer.session.errors import Fenced, StorageFailed
from everloop_trainer.session.operations import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    Sample,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from everloop_trainer.session.outcomes import Failed, Pending, Succeeded, Unknown
from everloop_trainer.session.ports import Copies
from everloop_trainer.session.service import SessionConfig, SessionService
from everloop_trainer.session.status import AutomaticCheckpoints, BaseModel
from everloop_trainer.store.compacting import LIMITS, Limits
from everloop_trainer.store.files import Files
from everloop_trainer.store.journal import JournalWriter
from everloop_trainer.store.opening import Claimant, OpenedStore, open_store
from tests.session.fake_engine import FakeEngine, FakeSource
from tests.store.crash_files import CrashFiles, Disk

BASE = BaseModel("smol", "r1", "ab" * 32)
SESSION = "s-0123456789abcdef-0123456789abcdef"
A = f"{SESSION}:train:0"
B = f"{SESSION}:train:1"
C = f"{SESSION}:train:2"
D = f"{SESSION}:train:3"
SAMPLER = f"{SESSION}:sample:0"
TIME = "2030-01-01T00:00:00Z"
PATIENCE = 20.0


def claimant(attempt: int = 1, pod: str = "pod-1", base: BaseModel = BASE) -> Claimant:
    return Claimant("tenant", "run", base, attempt, pod)


def create(model: str, rank: int = 4, seed: int | None = 7, base: str = "smol") -> Operation:
    return Operation(model, 0, CreateModel(base, rank, seed, True, True, True))


def fb(model: str, seq: int, body: bytes = b"tokens", *, forward_only: bool = False) -> Operation:
    return Operation(model, seq, ForwardBackward(forward_only, "cross_entropy"), body)


def optim(model: str, seq: int, learning_rate: float = 1e-3) -> Operation:
    return Operation(model, seq, OptimStep(learning_rate, 0.9, 0.95, 1e-12, 0.0, 0.0))


def save(model: str, seq: int, name: str | None, *, overwrite: bool = False) -> Operation:
    return Operation(model, seq, SaveWeights(name, overwrite=overwrite))


def load(model: str, seq: int, path: str, *, optimizer: bool = True) -> Operation:
    return Operation(model, seq, LoadWeights(path, optimizer))


def freeze(model: str, seq: int, sampler: int | None, name: str | None = None) -> Operation:
    return Operation(model, seq, SaveWeightsForSampler(name, sampler))


def export(model: str, seq: int, name: str, *recipients: str) -> Operation:
    return Operation(model, seq, SaveWeightsExternal(name, 3600, recipients))


def sample(stream: str, seq: int, weights: str | None = "sampler", seed: int | None = 5) -> Operation:
    return Operation(stream, seq, Sample((1, 2, 3), 1, 4, 1.0, 1.0, -1, None, seed, weights))


@dataclass
class Clock:
    """Monotonic seconds that go on by a little whenever somebody looks, and by as much as a test says."""

    now: float = 0.0
    looks: int = 0

    def __call__(self) -> float:
        self.looks += 1
        self.now += 1e-3
        return self.now


class ProcessFiles(Files, Protocol):
    """The file layer of one process that can be killed, and of its engine."""

    @property
    def dead(self) -> bool:
        """Whether it was killed."""

    def kill(self) -> None:
        """End the process."""

    def hangs(self, path: str) -> bool:
        """Whether the storage hangs for that path now."""

    def write_state(self, path: str, data: bytes) -> None:
        """Write a state file as an engine does; the path is absolute."""


F = TypeVar("F", bound=ProcessFiles)


@dataclass
class Serving(Generic[F]):
    """One incarnation that serves."""

    files: F
    store: OpenedStore
    service: SessionService
    source: FakeSource
    task: asyncio.Task[None]
    clock: Clock

    @property
    def engine(self) -> FakeEngine:
        return self.source.engines[-1]

    async def settled(self) -> None:
        """Return when every model is restored and nothing is pending."""

        def done() -> bool:
            if self.task.done():
                self.task.result()
            status = self.service.status()
            return status.state == "Serving" and not any(model.pending for model in status.models)

        await until(done)


Running = Serving[CrashFiles]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells of. Raises TimeoutError if it does not come."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.0005)


@asynccontextmanager
async def running(
    disk: Disk,
    *,
    files: CrashFiles | None = None,
    attempt: int = 1,
    pod: str = "pod-1",
    replay_budget: float = 0.0,
    hook: Callable[[FakeEngine, str], None] | None = None,
    max_models: int = 4,
    max_rank: int = 64,
    available: bool = True,
    fence_interval: float = 0.01,
    now: Callable[[], str] = lambda: TIME,
    checkpoint_every: float = 0.0,
    checkpoint_keep: int = 2,
    limits: Limits = LIMITS,
) -> AsyncIterator[Running]:
    """A started incarnation over a disk in memory; see `running_on`."""
    async with running_on(
        files or CrashFiles(disk),
        attempt=attempt,
        pod=pod,
        replay_budget=replay_budget,
        hook=hook,
        max_models=max_models,
        max_rank=max_rank,
        available=available,
        fence_interval=fence_interval,
        now=now,
        checkpoint_every=checkpoint_every,
        checkpoint_keep=checkpoint_keep,
        limits=limits,
    ) as world:
        yield world


@asynccontextmanager
async def running_on(
    files: F,
    *,
    attempt: int = 1,
    pod: str = "pod-1",
    replay_budget: float = 0.0,
    hook: Callable[[FakeEngine, str], None] | None = None,
    max_models: int = 4,
    max_rank: int = 64,
    available: bool = True,
    fence_interval: float = 0.01,
    now: Callable[[], str] = lambda: TIME,
    checkpoint_every: float = 0.0,
    checkpoint_keep: int = 2,
    limits: Limits = LIMITS,
    copies: Copies | None = None,
) -> AsyncIterator[Serving[F]]:
    """A started incarnation; leaving the block kills its process."""
    clock = Clock()
    store = await open_store(files, claimant(attempt, pod), TIME, probe_interval=0.005, limits=limits)
    source = FakeSource(files, hook, available=available)
    config = SessionConfig(
        incarnation=store.incarnation,
        previous=store.previous,
        lineage=store.lineage,
        base_model=BASE,
        max_models=max_models,
        max_rank=max_rank,
        replay_budget=replay_budget,
        checkpoints=AutomaticCheckpoints(checkpoint_every, checkpoint_keep),
        monotonic=clock,
        now=now,
        fence_interval=fence_interval,
        space_interval=0.005,
    )
    service = SessionService(
        config,
        store.journal,
        store.states,
        source,
        store.base,
        store.history,
        store.compactor,
        copies,
        store.restored,
    )
    task = asyncio.create_task(service.run())
    try:
        yield Serving(files, store, service, source, task, clock)
    finally:
        files.kill()
        await stop(task, store.journal)


async def stop(task: asyncio.Task[None], journal: JournalWriter) -> None:
    """End what runs in this process; its file layer is dead already, or of no interest any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await journal.close()


@dataclass
class Client:
    """A client that sends steps of operations, and remembers for ever what it was told.

    `acknowledged` and `told` outlive incarnations: a later one that contradicts them has broken the promise.
    """

    acknowledged: set[str] = field(default_factory=set)
    told: dict[str, Succeeded | Failed] = field(default_factory=dict)

    async def play(self, service: SessionService, steps: Iterable[list[Operation]]) -> None:
        """Send each step's operations at once, then wait for all of its outcomes. Repeats what was sent before."""
        for request in sorted(self.acknowledged):
            assert not isinstance(await service.outcome(request, 0), Unknown), f"{request} was acknowledged and lost"
        for step in steps:
            await asyncio.gather(*(self.send(service, operation) for operation in step))
            for operation in step:
                await self.ask(service, operation.request_id)

    async def send(self, service: SessionService, operation: Operation) -> None:
        await service.accept(operation)
        self.acknowledged.add(operation.request_id)

    async def ask_after(self, service: SessionService, operation: Operation) -> Succeeded | Failed:
        """Send one operation and return its outcome."""
        await self.send(service, operation)
        return await self.ask(service, operation.request_id)

    async def ask(self, service: SessionService, request: str) -> Succeeded | Failed:
        outcome = await service.outcome(request, PATIENCE)
        assert not isinstance(outcome, Pending | Unknown), f"{request}: {outcome}"
        assert self.told.setdefault(request, outcome) == outcome, f"{request} was told differently before"
        return outcome


LOOP: list[list[Operation]] = [
    [create(A), create(B, rank=8, seed=9)],
    [fb(A, 1, b"a1"), fb(A, 2, b"a2"), optim(A, 3), fb(B, 1, b"b1"), optim(B, 2)],
    [freeze(A, 4, 0)],
    [sample(SAMPLER, 0), fb(A, 5, b"a5"), optim(A, 6), fb(B, 3, b"b3"), optim(B, 4)],
    [save(B, 5, "half"), fb(A, 7, b"bad"), optim(A, 8)],
    [fb(A, 9, b"a9"), optim(A, 10), fb(B, 6, b"b6"), optim(B, 7)],
]
"""A loop on two models with everything in it: chunks, a sampler, a checkpoint, and a failure that costs a step."""


LOADS: list[list[Operation]] = [
    [create(A)],
    [fb(A, 1, b"a1"), optim(A, 2)],
    [save(A, 3, "half"), freeze(A, 4, None, "thin")],
    [load(C, 0, f"tinker://{A}/weights/half"), load(D, 0, f"tinker://{A}/sampler_weights/thin", optimizer=False)],
    [fb(A, 5, b"five"), optim(A, 6), fb(C, 1, b"five"), optim(C, 2), fb(D, 1, b"five"), optim(D, 2)],
    [fb(A, 7, b"dropped"), load(A, 8, f"tinker://{A}/weights/half", optimizer=False), save(D, 3, "other")],
    [fb(A, 9, b"five"), optim(A, 10), load(C, 3, f"tinker://{A}/weights/none"), fb(C, 4, b"c4"), optim(C, 5)],
    [load(D, 4, f"tinker://{A}/weights/half"), fb(D, 5, b"d5"), optim(D, 6), fb(A, 11, b"a11"), optim(A, 12)],
]
"""Loads of each kind: into new models and into existing ones, with optimizer and without, and one that fails."""


def states(engine: FakeEngine) -> dict[str, bytes]:
    """The adapters of an engine, byte for byte."""
    return {model: adapter.dump() for model, adapter in engine.models.items()}


async def unbroken(loop: list[list[Operation]]) -> tuple[dict[str, bytes], dict[str, Succeeded | Failed]]:
    """Final adapters and outcomes of a loop that nothing happens to."""
    client = Client()
    async with running(Disk()) as world:
        await client.play(world.service, loop)
        await world.settled()
        return states(world.engine), client.told


Over = (Fenced, StorageFailed)


def pods() -> Iterator[tuple[int, str]]:
    """Attempts and pod names for one incarnation after another, each in a new pod."""
    for attempt in itertools.count(1):
        yield attempt, f"pod-{attempt}"
