"""Training losses: objectives over the log-probabilities of targets. Sums, never means (tinker SDK, forward_backward).

In the formulas p is the log-probability of a target now, q the one that it was sampled with (`logprobs`), A its
advantage, r = exp(p - q). A position whose advantage is 0 adds nothing, whatever its q is: prompts carry any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

Inputs = Mapping[str, torch.Tensor]
Options = Mapping[str, float]

SEQUENCE_LOG_RATIO = "sequence_log_ratio"
"""What GSPO adds to its inputs."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss function.

    Attributes:
        inputs: what a datum gives besides `target_tokens`, float32, a value for each target.
        objective: the loss of each target from p and inputs, float32 (positions, targets) all of them.
        options: names and defaults; a default of None has to be given.
        several_targets: whether a position may have more than one.
        of_sequence: further inputs from those of one whole datum, p without gradient.
        stands_in_for: the loss that it is taken for where a platform says so; each answer's metrics name it.
    """

    inputs: tuple[str, ...]
    objective: Callable[[torch.Tensor, Inputs, Options], torch.Tensor]
    options: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))
    several_targets: bool = False
    of_sequence: Callable[[torch.Tensor, Inputs], Inputs] | None = None
    stands_in_for: str = ""


def cross_entropy(p: torch.Tensor, inputs: Inputs, _: Options) -> torch.Tensor:
    """-p * w. Weights may be negative: the client's part of a custom loss sends its gradient as such."""
    return -p * inputs["weights"]


def importance_sampling(p: torch.Tensor, inputs: Inputs, _: Options) -> torch.Tensor:
    """-r * A."""
    return -torch.exp(_log_ratio(p, inputs)) * inputs["advantages"]


def ppo(p: torch.Tensor, inputs: Inputs, options: Options) -> torch.Tensor:
    """-min(r * A, clip(r) * A) (Schulman et al., 2017)."""
    return _clipped(torch.exp(_log_ratio(p, inputs)), inputs, options)


def cispo(p: torch.Tensor, inputs: Inputs, options: Options) -> torch.Tensor:
    """-clip(r) * p * A, where clip(r) has no gradient (MiniMax, 2025)."""
    return -_clip(torch.exp(_log_ratio(p, inputs)), options).detach() * p * inputs["advantages"]


def dro(p: torch.Tensor, inputs: Inputs, options: Options) -> torch.Tensor:
    """-(p * A - beta / 2 * (p - q)^2) (Richemond et al., 2024). Here q counts where A is 0, too."""
    return -(p * inputs["advantages"] - 0.5 * options["beta"] * (p - inputs["logprobs"]) ** 2)


def gspo(p: torch.Tensor, inputs: Inputs, options: Options) -> torch.Tensor:
    """PPO's with the ratio of the whole sequence and the gradient of each token's own p (Zheng et al., 2025)."""
    ratio = torch.exp(_where_it_counts(inputs[SEQUENCE_LOG_RATIO], inputs) + p - p.detach())
    return _clipped(ratio, inputs, options)


def sequence_log_ratio(p: torch.Tensor, inputs: Inputs) -> Inputs:
    """The mean of p - q over the positions that `sequence_ratio_mask` marks, at each position."""
    marked = (p - inputs["logprobs"])[inputs["sequence_ratio_mask"] != 0]
    mean = marked.mean() if marked.numel() else torch.zeros(())
    return {SEQUENCE_LOG_RATIO: mean.expand_as(p)}


def stable_reinforce_stand_in(p: torch.Tensor, inputs: Inputs, options: Options) -> torch.Tensor:
    """-clip(r) * p * A + kl_coeff * (exp(q - p) - 1 - (q - p)), where clip(r) and A have no gradient.

    REINFORCE (Williams, 1992) with a truncated importance ratio (Ionides, 2008) and an estimate of the divergence from
    the sampling policy (Schulman, 2020, k3). Ours: the loss that it stands in for is not published.
    """
    log_ratio = _log_ratio(p, inputs)
    weighted = (_clip(torch.exp(log_ratio), options) * inputs["advantages"]).detach()
    return -weighted * p + options["kl_coeff"] * (torch.exp(-log_ratio) - 1 + log_ratio)


def _where_it_counts(values: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.where(inputs["advantages"] != 0, values, torch.zeros(()))


def _log_ratio(p: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return _where_it_counts(p - inputs["logprobs"], inputs)


def _clip(ratio: torch.Tensor, options: Options) -> torch.Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def _clipped(ratio: torch.Tensor, inputs: Inputs, options: Options) -> torch.Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, options) * advantages)


def _bounds(low: float, high: float) -> Mapping[str, float | None]:
    return MappingProxyType({"clip_low_threshold": low, "clip_high_threshold": high})


_POLICY_GRADIENT = ("logprobs", "advantages")

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross_entropy": Loss(("weights",), cross_entropy, several_targets=True),
        "importance_sampling": Loss(_POLICY_GRADIENT, importance_sampling),
        "ppo": Loss(_POLICY_GRADIENT, ppo, _bounds(0.8, 1.2)),
        "cispo": Loss(_POLICY_GRADIENT, cispo, _bounds(0.0, 4.0)),
        "dro": Loss(_POLICY_GRADIENT, dro, MappingProxyType({"beta": None})),
        # The paper's bounds: a mean over a sequence varies far less than a token's ratio.
        "gspo": Loss(
            (*_POLICY_GRADIENT, "sequence_ratio_mask"),
            gspo,
            _bounds(1 - 3e-4, 1 + 4e-4),
            of_sequence=sequence_log_ratio,
        ),
        "stable_reinforce_stand_in": Loss(
            _POLICY_GRADIENT,
            stable_reinforce_stand_in,
            MappingProxyType({**_bounds(0.0, 2.0), "kl_coeff": 0.0}),
            stands_in_for="stable_reinforce",
        ),
    }
)
"""By the name that `forward_backward` is called with."""

TRACED = "custom"
"""The name of a loss that a client has traced and sent (`everloop_losses`)."""

BY_SLOPE = Loss(("weights",), cross_entropy, several_targets=True)
"""What is differentiated of a traced loss: -p * w, where w is its negative slope by p, as in a client's part of it."""

UNSUPPORTED: Mapping[str, str] = MappingProxyType({"stable_reinforce": "its definition is not published"})
"""Other names that the SDK knows, and why they are refused."""
