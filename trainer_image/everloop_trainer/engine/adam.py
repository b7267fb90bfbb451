"""AdamW (Loshchilov & Hutter, 2019) with the semantics of torch.optim.AdamW, on one flat float32 vector."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from everloop_trainer.engine.errors import ContentError

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_LARGEST = float(np.finfo(np.float32).max)
"""torch takes no greater factor for float32 tensors."""


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Hyperparameters of one step (tinker SDK, AdamParams); all may change from step to step.

    `weight_decay` is decoupled; `grad_clip_norm` bounds the global gradient norm, 0 turns that off.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float

    def check(self) -> None:
        """Raise ContentError naming the field that is out of range."""
        for name, limit in (("learning_rate", _LARGEST), ("weight_decay", _LARGEST), ("grad_clip_norm", math.inf)):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= limit):
                raise ContentError(f"adam_params.{name}: must be finite in float32 and not negative, got {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ContentError(f"adam_params.{name}: must be at least 0 and below 1, got {value}")
        # A factor whose gradient is zero (A, while B is zero) would be divided by zero.
        if not float(np.finfo(np.float32).smallest_subnormal) < self.eps <= _LARGEST:
            raise ContentError(f"adam_params.eps: must be finite and greater than zero in float32, got {self.eps}")


@dataclass(slots=True)
class AdamState:
    """Moments, float32 (parameters,), and the number of steps taken."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int


@torch.no_grad()
def adam_step(flat: torch.Tensor, state: AdamState, gradients: torch.Tensor, params: AdamParams) -> dict[str, float]:
    """Update `flat` and `state` in place and return metrics; `gradients` is used up.

    Everything that allocates comes before the first change, so that running out of memory changes nothing. Raises
    ContentError if this step's size is beyond float32.
    """
    step_size = params.learning_rate / (1 - params.beta1 ** (state.step + 1))
    if step_size > _LARGEST:
        raise ContentError(
            f"adam_params.learning_rate: must be smaller, {params.learning_rate} with beta1 {params.beta1} "
            f"makes a step of {step_size}"
        )
    denominator = torch.empty_like(flat)
    norm = torch.linalg.vector_norm(gradients, dtype=torch.float64).item()
    clip = params.grad_clip_norm / (norm + _CLIP_EPSILON) if params.grad_clip_norm > 0 else 1.0
    if clip < 1.0:
        gradients.mul_(clip)

    state.step += 1
    flat.mul_(1 - params.learning_rate * params.weight_decay)
    state.exp_avg.lerp_(gradients, 1 - params.beta1)
    state.exp_avg_sq.mul_(params.beta2).addcmul_(gradients, gradients, value=1 - params.beta2)
    correction = math.sqrt(1 - params.beta2**state.step)
    torch.sqrt(state.exp_avg_sq, out=denominator)
    denominator.div_(correction).add_(params.eps)
    flat.addcdiv_(state.exp_avg, denominator, value=-step_size)
    return {"grad_norm": norm, "clipped": 1.0 if clip < 1.0 else 0.0, "learning_rate": params.learning_rate}
