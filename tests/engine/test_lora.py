"""Initialisation and layout of adapters."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.lora import Adapter, LoraSpec

ALL: dict[str, Any] = {"rank": 4, "seed": 5, "train_mlp": True, "train_attn": True, "train_unembed": True}


def _fresh(base: BaseModel, **changes: Any) -> Adapter:
    adapter = Adapter(LoraSpec(**{**ALL, **changes}), base.targets)
    adapter.initialise()
    return adapter


def test_initialisation_is_the_formula(tiny_base: BaseModel) -> None:
    """B is zero; A is uniform in +-1/sqrt(fan_in), drawn from a generator seeded by seed and module name."""
    for name, (a, b) in _fresh(tiny_base).factors.items():
        assert not b.any()
        seed = int.from_bytes(hashlib.sha256(f"5\n{name}".encode()).digest()[:8], "little") // 2
        # kaiming_uniform with a = sqrt(5): gain sqrt(2 / (1 + 5)), bound = gain * sqrt(3 / fan_in)
        bound = math.sqrt(2 / (1 + 5)) * math.sqrt(3 / a.shape[1])
        expected = torch.empty(a.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(a.detach(), expected, rtol=1e-6, atol=0)
        assert bound == pytest.approx(1 / math.sqrt(a.shape[1]))


def test_factors_depend_on_seed_and_name_only(tiny_base: BaseModel) -> None:
    """Another seed gives other factors; training fewer groups leaves those of the others as they were."""
    whole, other, attention = _fresh(tiny_base), _fresh(tiny_base, seed=6), _fresh(tiny_base, train_mlp=False)
    for name, (a, _) in whole.factors.items():
        assert not torch.equal(a, other.factors[name][0])
        if name in attention.factors:
            assert torch.equal(a, attention.factors[name][0])
    assert not any("mlp" in name for name in attention.factors)


def test_keys_are_those_of_peft(tiny_base: BaseModel) -> None:
    """Seven modules in each of two layers and the head, with two factors each, under PEFT's names."""
    adapter = _fresh(tiny_base)
    shapes = {entry.key: entry.shape for entry in adapter.entries}
    assert len(shapes) == (2 * 7 + 1) * 2
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == (4, 64)
    assert shapes["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"] == (64, 4)
    assert shapes["base_model.model.lm_head.lora_B.weight"] == (320, 4)
    assert adapter.entries[-1].stop == sum(rows * columns for rows, columns in shapes.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "^rank: must be between 1 and 16, got 0"),
        ({"rank": 17}, "^rank: must be between 1 and 16, got 17"),
        ({"train_mlp": False, "train_attn": False, "train_unembed": False}, "at least one must be true"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    """A rank out of bounds and an adapter of nothing are the user's errors."""
    with pytest.raises(ContentError, match=message):
        LoraSpec(**{**ALL, **changes}).check(16)
