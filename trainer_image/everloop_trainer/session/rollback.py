"""Models whose storage was lost: they end where the copies in S3 end, and only their checkpoints are left. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, with_config

from everloop_trainer.session.copied import explanation
from everloop_trainer.session.lora import Lora
from everloop_trainer.session.metadata import Metadata


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """A checkpoint that came back from a copy."""

    kind: str
    key: str
    name: str
    step: int
    sha256: str
    size: int
    time: str
    user_metadata: Metadata = None


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class RolledBack:
    """A model that goes no further.

    Attributes:
        number: the last operation that any of its copies holds.
        step: optimizer steps up to there.
        resume: tinker path of the newest checkpoint that holds weights and optimizer; empty if there is none.
        time: when it was restored, RFC 3339.
        source: tinker path of what it held a copy of; empty for a model that was trained.
    """

    model_id: str
    base_model: str
    lora: Lora
    number: int
    step: int
    resume: str
    time: str
    checkpoints: tuple[RestoredCheckpoint, ...] = ()
    source: str = ""

    @property
    def explanation(self) -> str:
        """What every operation of the model is answered, whether it was accepted before the loss or comes now."""
        if self.source:
            return explanation(self.model_id, self.source)
        there = (
            f"go on from {self.resume!r} with create_training_client_from_state_with_optimizer"
            if self.resume
            else "no checkpoint with its optimizer was copied"
        )
        return (
            f"model_id: the storage of {self.model_id} was lost and restored from its copies: the model is rolled back "
            f"to operation {self.number} (step {self.step}), and what came after it is gone; {there}"
        )
