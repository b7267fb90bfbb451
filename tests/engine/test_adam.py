"""Adam agrees with torch.optim.AdamW, step by step and with every hyperparameter."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from everloop_trainer.engine.adam import AdamParams, AdamState, adam_step
from everloop_trainer.engine.errors import ContentError

DEFAULT = AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
CHANGES: dict[str, list[dict[str, float]]] = {
    "defaults": [{}],
    "learning rate": [{"learning_rate": 1e-2}, {"learning_rate": 0.0}, {"learning_rate": 3e-3}],
    "betas": [{"beta1": 0.0, "beta2": 0.5}, {"beta1": 0.8, "beta2": 0.999}],
    "eps": [{"eps": 1e-3}, {"eps": 1e-8}],
    "weight decay": [{"weight_decay": 0.1, "learning_rate": 0.05}],
    "clipping": [{"grad_clip_norm": 0.5}, {"grad_clip_norm": 1e9}, {"grad_clip_norm": 1e-9}],
}


def _ulps(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    spacing = np.spacing(np.maximum(np.abs(ours.numpy()), np.abs(theirs.numpy())))
    return float((np.abs(ours.numpy() - theirs.numpy()) / spacing).max())


@pytest.mark.parametrize("case", CHANGES)
def test_steps_equal_torch(case: str) -> None:
    """20 steps with hyperparameters that change from step to step; tolerance: 1 ulp a step in weights and moments."""
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(1001, generator=generator)
    reference = flat.clone().requires_grad_()
    state = AdamState(torch.zeros_like(flat), torch.zeros_like(flat), 0)
    optimizer = torch.optim.AdamW([reference], foreach=False)
    for index in range(20):
        params = dataclasses.replace(DEFAULT, **CHANGES[case][index % len(CHANGES[case])])
        gradient = torch.randn(1001, generator=generator)
        reference.grad = gradient.clone()
        norm = gradient.double().norm().item()
        clipped = 0 < params.grad_clip_norm < norm
        if clipped:
            # By hand: clip_grad_norm_ has the same formula, but its float32 norm differs in the last bits.
            reference.grad.mul_(params.grad_clip_norm / (norm + 1e-6))
        optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        optimizer.step()
        metrics = adam_step(flat, state, gradient, params)
        moments = optimizer.state[reference]
        assert _ulps(flat, reference.detach()) <= index + 1
        assert _ulps(state.exp_avg, moments["exp_avg"]) <= index + 1
        assert _ulps(state.exp_avg_sq, moments["exp_avg_sq"]) <= index + 1
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-12)
        assert metrics["clipped"] == float(clipped)
    assert state.step == 20


def test_clipping_is_that_of_torch() -> None:
    """The clipped gradient that enters the first moment equals clip_grad_norm_'s within float32 rounding."""
    gradient = torch.arange(1.0, 9.0)
    expected = gradient.clone().requires_grad_()
    expected.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([expected], 2.0)
    state = AdamState(torch.zeros(8), torch.zeros(8), 0)
    adam_step(torch.zeros(8), state, gradient, dataclasses.replace(DEFAULT, grad_clip_norm=2.0, beta1=0.0))
    torch.testing.assert_close(state.exp_avg, expected.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-4),
        ("learning_rate", math.nan),
        ("learning_rate", 1e39),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("beta2", math.nan),
        ("eps", 0.0),
        ("eps", 1e-60),
        ("eps", math.inf),
        ("eps", 1e39),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("weight_decay", 1e39),
        ("grad_clip_norm", -1.0),
    ],
)
def test_out_of_range(field: str, value: float) -> None:
    """A hyperparameter that would spoil the weights is refused by name."""
    with pytest.raises(ContentError, match=rf"^adam_params\.{field}: must be"):
        dataclasses.replace(DEFAULT, **{field: value}).check()


def test_a_step_beyond_float32_changes_nothing() -> None:
    """A learning rate that the bias correction makes too large for torch is refused before anything changes."""
    flat, state = torch.ones(3), AdamState(torch.zeros(3), torch.zeros(3), 0)
    params = dataclasses.replace(DEFAULT, learning_rate=3e38)
    params.check()
    with pytest.raises(ContentError, match=r"^adam_params\.learning_rate: must be smaller"):
        adam_step(flat, state, torch.ones(3), params)
    assert (state.step, flat.tolist(), state.exp_avg.tolist()) == (0, [1.0] * 3, [0.0] * 3)
