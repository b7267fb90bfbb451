"""The session as the server sees it: accept operations, wait for outcomes, tell the state, drive the engine."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from everloop_trainer.session.operations import Operation
from everloop_trainer.session.outcomes import Outcome, Pending, Unknown
from everloop_trainer.session.ports import Lora
from everloop_trainer.session.status import BaseModel, Incarnation, SessionStatus


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session is given at its start.

    Attributes:
        previous: the incarnation before this one, if the storage has had one.
        replay_budget: seconds of engine time after which a model is snapshotted.
    """

    incarnation: Incarnation
    previous: Incarnation | None
    lineage: str
    base_model: BaseModel
    max_models: int
    max_rank: int
    replay_budget: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that exists (its creation succeeded)."""

    model_id: str
    base_model: str
    lora: Lora


@dataclass(frozen=True, slots=True)
class SamplerInfo:
    """A sampling session that a save_weights_for_sampler of this session made. `weights` is a `frozen:` name."""

    sampling_session_id: str
    model_id: str
    kind: str
    weights: str


class SessionService:
    """See the module. Everything that may be awaited raises Fenced or StorageFailed once this incarnation has ended."""

    def accept(self, operation: Operation) -> Awaitable[None]:
        """Accept an operation; ends once it is durable and the fence was read. A repeat waits for the first."""
        raise NotImplementedError

    async def outcome(self, request_id: str, timeout: float) -> Outcome | Pending | Unknown:
        """The outcome of an operation, waiting up to `timeout` seconds for it."""
        raise NotImplementedError

    def model(self, model_id: str) -> ModelInfo | None:
        """A model of this session."""
        raise NotImplementedError

    def sampler(self, sampling_session_id: str) -> SamplerInfo | None:
        """A sampling session made by this session."""
        raise NotImplementedError

    def status(self) -> SessionStatus:
        """The state as plain values."""
        raise NotImplementedError

    async def run(self) -> None:
        """Drive the engine until this incarnation ends: raises Fenced or StorageFailed; returns after `drain`."""
        raise NotImplementedError

    async def drain(self, timeout: float) -> None:
        """Orderly shutdown within `timeout` seconds: finish or abandon the running operation, snapshot all models."""
        raise NotImplementedError
