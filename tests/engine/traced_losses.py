"""Losses as users write them, for the SDK to trace; each with the ranks of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Traced = tuple[Tensor, dict[str, Tensor]]


def neg_ll(logprobs: Tensor, weights: Tensor) -> Traced:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss}


def clipped_ratio(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Traced:
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    outside = (ratio != clipped).float().mean()
    return loss, {"custom/outside:mean": outside, "custom/ratio/max:mean": ratio.max()}


def penalised(logprobs: Tensor, old: Tensor, advantages: Tensor, beta: Tensor) -> Traced:
    log_ratio = torch.where(advantages != 0, old - logprobs, torch.zeros_like(old))
    divergence = torch.exp(log_ratio) - 1 - log_ratio
    loss = (beta * divergence - logprobs * advantages).sum() / math.sqrt(logprobs.shape[0])
    return loss, {"custom/kl:mean": divergence.detach().mean()}


def preference(logprobs: Tensor, weights: Tensor, margin: Tensor) -> Traced:
    score = (logprobs * weights).sum() - margin
    loss = -functional.logsigmoid(0.1 * score)
    loss += functional.softplus(score) * 1e-3
    return loss, {"custom/accuracy:mean": (score > 0).float()}


def distillation(logprobs: Tensor, teacher: Tensor) -> Traced:
    """Several targets a position: the divergence from a teacher's distribution over them."""
    own = torch.log_softmax(logprobs, dim=-1)
    loss = functional.kl_div(own, torch.log_softmax(teacher, -1), reduction="sum", log_target=True)
    best, _ = logprobs.max(dim=-1)
    worst = logprobs.min(dim=-1).values
    return loss, {
        "custom/best:mean": best.mean(),
        "custom/worst:mean": worst.mean(),
        "custom/n:sum": torch.ones_like(best).sum(),
    }


def indexed(logprobs: Tensor, weights: Tensor, advantages: Tensor) -> Traced:
    """Masks, slices, indices and shapes."""
    chosen = logprobs[weights > 0]
    tail = logprobs[logprobs.size(0) // 2 :]
    order = torch.argsort(advantages, descending=True)[:3]
    pairs = logprobs[:, None] - logprobs[None, :]
    parts = torch.stack([chosen.sum(), tail.mean(), logprobs.gather(0, order).sum(), pairs.abs().mean()])
    scale = logprobs.new_full((4,), 0.5).to(torch.float64).cumsum(0).float()
    loss = (parts * scale).sum() + 0.1 * logprobs.flip(0).masked_fill(weights == 0, 0.0).square().sum() ** 0.5
    return -loss, {"custom/chosen:sum": (weights > 0).sum(), "custom/spread:mean": logprobs.std(unbiased=False)}


LOSSES: Mapping[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "neg_ll": (neg_ll, {"logprobs": 1, "weights": 1}),
    "clipped_ratio": (clipped_ratio, {"logprobs": 1, "old": 1, "advantages": 1}),
    "penalised": (penalised, {"logprobs": 1, "old": 1, "advantages": 1, "beta": 0}),
    "preference": (preference, {"logprobs": 1, "weights": 1, "margin": 0}),
    "distillation": (distillation, {"logprobs": 2, "teacher": 2}),
    "indexed": (indexed, {"logprobs": 1, "weights": 1, "advantages": 1}),
}
