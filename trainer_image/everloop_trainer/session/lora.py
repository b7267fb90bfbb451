"""The shape of an adapter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lora:
    """The shape of an adapter and the seed of its initialisation."""

    rank: int
    seed: int
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
