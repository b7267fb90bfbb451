"""Training losses: per-token objectives over log-probabilities. Sums, never means (tinker SDK, forward_backward)."""

from __future__ import annotations

import torch

CROSS_ENTROPY = "cross_entropy"
SUPPORTED = (CROSS_ENTROPY,)


def cross_entropy(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return -p * w per token; both inputs float32 (n,). Weights may be negative: a custom loss sends its gradient."""
    return -logprobs * weights
