"""Plain references, written from the formulas on top of an unmodified transformers model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from everloop_trainer.engine.datums import TrainingDatum
from everloop_trainer.engine.lora import Adapter


def plain_model(path: Path) -> Any:
    """The base model as transformers loads it, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def merged_logits(
    model: Any, adapter: Adapter, factors: dict[str, tuple[torch.Tensor, torch.Tensor]], tokens: torch.Tensor
) -> torch.Tensor:
    """Logits (length, vocabulary) of one sequence with W + (32 / rank) B A for W; embeddings stay as they are."""
    weights = {
        f"{name}.weight": model.get_submodule(name).weight.detach() + (32 / adapter.spec.rank) * (b @ a)
        for name, (a, b) in factors.items()
    }
    return functional_call(model, weights, args=(), kwargs={"input_ids": tokens[None]}, tie_weights=False).logits[0]


Objective = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""The loss of one whole datum, a scalar, from its log-probabilities and inputs."""


def loss_and_gradient(
    model: Any, adapter: Adapter, data: Sequence[TrainingDatum], objective: Objective
) -> tuple[float, list[torch.Tensor], torch.Tensor]:
    """The sum over datums, the logprobs of each datum's targets, and the gradient in the order of adapter.flat."""
    factors = {
        name: (a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_())
        for name, (a, b) in adapter.factors.items()
    }
    total = torch.zeros(())
    logprobs = []
    for datum in data:
        scores = torch.log_softmax(merged_logits(model, adapter, factors, torch.from_numpy(datum.tokens)), dim=-1)
        targets = torch.from_numpy(datum.targets)
        picked = scores.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
        logprobs.append(picked.detach())
        total = total + objective(picked, {name: torch.from_numpy(values) for name, values in datum.inputs.items()})
    leaves = [leaf for pair in factors.values() for leaf in pair]
    gradients = torch.autograd.grad(total, leaves)
    return total.item(), logprobs, torch.cat([gradient.reshape(-1) for gradient in gradients])


def randomise(adapter: Adapter, seed: int = 1) -> None:
    """Give B values of the size of a trained adapter's, so that every term of every gradient is there."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapter.factors.values():
            b.uniform_(-0.02, 0.02, generator=generator)
