"""Training runs that hold the copy of a checkpoint and nothing else: no operation of theirs ever runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, with_config

from everloop_trainer.session.lora import Lora


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class CopiedRun:
    """A training run that `copy_weights` made. It stays known when its checkpoint goes, so that a repeat finds it.

    Attributes:
        path: tinker path of its checkpoint.
        source: tinker path of what was copied.
        holder: the model below which the file lies, which both share; `key` is its name there.
        time: when it was made, RFC 3339.
    """

    run_id: str
    path: str
    source: str
    holder: str
    key: str
    base_model: str
    lora: Lora
    time: str

    @property
    def explanation(self) -> str:
        """What every operation of the run is answered."""
        return explanation(self.run_id, self.source)


def explanation(run_id: str, source: str) -> str:
    """The same for one whose storage was lost and restored."""
    return (
        f"model_id: {run_id} holds a copy of {source!r} and can't be trained; "
        "create_training_client_from_state makes a model of it"
    )
