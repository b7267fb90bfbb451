"""What a computation took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """What a computation took: seconds of its parts, and tokens; for figures, not for any decision."""

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    trained: int = 0
    """Tokens of a forward_backward."""
    scored: int = 0
    """Tokens of a forward without a backward."""
    prompt: int = 0
    """Tokens of prompts that were sampled from; a prompt counts once, however many samples it has."""
    sampled: int = 0
