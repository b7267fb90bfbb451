"""What the parts of a running session share: its facts, its ports, and how it ends."""

from __future__ import annotations

import asyncio
import datetime
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from everloop_trainer.session.errors import Fenced, StorageFailed
from everloop_trainer.session.history import History
from everloop_trainer.session.ports import Journal, States
from everloop_trainer.session.status import AutomaticCheckpoints, BaseModel, Incarnation
from everloop_trainer.session.turns import Keys
from everloop_trainer.session.underway import Underway
from everloop_trainer.session.work import Work

SEED_BITS = 31
log = structlog.get_logger(__name__)


def now() -> str:
    """Wall-clock time as RFC 3339, for display only."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def draw_seed() -> int:
    """A seed for an operation that came without one; journaled, so drawn once."""
    return secrets.randbits(SEED_BITS)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session is given at its start.

    Attributes:
        previous: the incarnation before this one, if the storage has had one.
        replay_budget: greatest seconds of engine time between two snapshots of a model.
        checkpoints: how automatic checkpoints are taken until something else is asked for.
        remember: called with what is asked for, before it holds; raises OSError if that can't be kept.
        monotonic: a clock in seconds.
        now: wall-clock time as RFC 3339.
        draw_seed: seed of an operation that came without one.
        space_interval: seconds between two tries to store something in storage that is full.
        fence_interval: seconds between readings of the fence while nothing else reads it.
    """

    incarnation: Incarnation
    previous: Incarnation | None
    lineage: str
    base_model: BaseModel
    max_models: int
    max_rank: int
    replay_budget: float
    checkpoints: AutomaticCheckpoints = field(default_factory=AutomaticCheckpoints)
    remember: Callable[[AutomaticCheckpoints], None] = lambda _: None
    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], str] = now
    draw_seed: Callable[[], int] = draw_seed
    space_interval: float = 1.0
    fence_interval: float = 1.0


@dataclass(slots=True)
class Context:
    """Shared by the parts of one running session.

    `ended` fails when this incarnation is over; `underway` is what is being done to stored states.
    """

    config: SessionConfig
    history: History
    journal: Journal
    states: States
    ended: asyncio.Future[None]
    underway: Underway
    full: str = ""
    """Why the operation that runs now cannot be stored: the storage is full, over its quota or read-only."""
    replay_mismatches: int = 0
    work: Work = field(default_factory=Work)
    keys: Keys = field(default_factory=Keys)
    broken: dict[str, str] = field(default_factory=dict)
    """Streams that stopped, and why: their operations wait for a person, or for an engine that finds all well again."""
    storage_errors: dict[str, str] = field(default_factory=dict)
    """What could not be stored the last time that it was tried, and why; it is tried again by itself."""
    checkpoints: AutomaticCheckpoints = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = self.config.checkpoints

    def stop(self, stream: str, why: str) -> None:
        """Run nothing more of this stream, and say so; the others go on."""
        if self.broken.get(stream) != why:
            log.error("stopped: its operations wait until its storage is mended", stream=stream, reason=why)
        self.broken[stream] = why

    def end(self, failure: Fenced | StorageFailed) -> None:
        """Nothing more may be acknowledged or delivered: stop everything."""
        if not self.ended.done():
            self.ended.set_exception(failure)
            self.ended.exception()  # retrieved: whoever waits for anything is told
