"""What every adapter has in common, and what a named one says of itself; needs nothing that is not in Python."""

from __future__ import annotations

from dataclasses import dataclass

ALPHA = 32
"""LoRA alpha of every adapter, whatever its rank, as the hosted service has it; the scale is alpha / rank."""


@dataclass(frozen=True, slots=True)
class About:
    """What a named adapter says of itself.

    Attributes:
        base_model: the base model's name.
        revision: of the base model; empty if it has none.
        training_run: id of the model that was trained.
        checkpoint: name under which it was saved.
    """

    base_model: str
    revision: str
    training_run: str
    checkpoint: str
