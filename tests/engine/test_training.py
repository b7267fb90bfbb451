"""Losses, log-probabilities and gradients agree with plain torch and with PEFT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from everloop_trainer.engine import training
from everloop_trainer.engine.base import BaseModel, load_base
from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.datums import TrainingBatch, TrainingDatum
from everloop_trainer.engine.lora import Adapter, LoraSpec
from everloop_trainer.engine.losses import LOSSES
from tests.engine.models import ARCHITECTURES, VOCABULARY, make_model
from tests.engine.reference import loss_and_gradient, merged_logits, plain_model, randomise

ALL = LoraSpec(rank=4, seed=5, train_mlp=True, train_attn=True, train_unembed=True)


def _data(*lengths: int, seed: int = 0) -> TrainingBatch:
    generator = np.random.default_rng(seed)
    return TrainingBatch(
        LOSSES["cross_entropy"],
        {},
        [
            TrainingDatum(
                generator.integers(0, VOCABULARY, length),
                generator.integers(0, VOCABULARY, length),
                {"weights": generator.normal(size=length).astype(np.float32)},
            )
            for length in lengths
        ],
    )


def _adapter(base: BaseModel, spec: LoraSpec = ALL) -> Adapter:
    adapter = Adapter(spec, base.targets)
    adapter.initialise()
    randomise(adapter)
    return adapter


@pytest.mark.parametrize(
    "groups",
    [
        {"train_attn": True, "train_mlp": True, "train_unembed": True},
        {"train_attn": True, "train_mlp": False, "train_unembed": False},
        {"train_attn": False, "train_mlp": True, "train_unembed": False},
        {"train_attn": False, "train_mlp": False, "train_unembed": True},
    ],
    ids=["all", "attn", "mlp", "unembed"],
)
def test_loss_and_gradient_are_those_of_the_formula(
    tiny_base: BaseModel, tiny_model: Path, groups: dict[str, bool]
) -> None:
    """sum(-p * w), negative weights included, and its gradient, over several micro-batches and slices of the head."""
    adapter = _adapter(tiny_base, LoraSpec(rank=3, seed=5, **groups))
    data = _data(5, 33, 1, 300, 20)
    loss, logprobs, gradient = loss_and_gradient(
        plain_model(tiny_model), adapter, data.data, lambda p, inputs: (-p * inputs["weights"]).sum()
    )
    outcome, found = training.forward_backward(tiny_base, adapter, data, budget=128)
    assert outcome.loss == pytest.approx(loss, rel=1e-5, abs=1e-3)
    for ours, theirs in zip(outcome.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-4)
    assert (found - gradient).norm() < 1e-5 * gradient.norm()
    assert gradient.abs().max() > 0.1


def test_forward_is_forward_backward_without_gradient(tiny_base: BaseModel) -> None:
    """Both report the same bits, and forward leaves no gradient behind."""
    adapter = _adapter(tiny_base)
    data = _data(7, 12)
    outcome, _ = training.forward_backward(tiny_base, adapter, data, budget=1024)
    tiny_base.use(adapter)
    assert training.forward(tiny_base, data, budget=1024).to_proto() == outcome.to_proto()
    assert all(leaf.grad is None for pair in adapter.factors.values() for leaf in pair)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT calls it
def test_logits_with_attention_and_mlp_equal_peft(tiny_base: BaseModel, tiny_model: Path) -> None:
    """PEFT with our factors computes the same logits."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import set_peft_model_state_dict

    adapter = _adapter(tiny_base, LoraSpec(rank=4, seed=5, train_mlp=True, train_attn=True, train_unembed=False))
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peft = get_peft_model(plain_model(tiny_model), LoraConfig(r=4, lora_alpha=32, target_modules=names))
    ours = {entry.key: adapter.flat[entry.start : entry.stop].view(entry.shape) for entry in adapter.entries}
    assert not set_peft_model_state_dict(peft, ours).unexpected_keys
    tokens = torch.from_numpy(_data(24).data[0].tokens)[None]
    tiny_base.use(adapter)
    with torch.no_grad():
        expected = peft.eval()(input_ids=tokens).logits[0]
        torch.testing.assert_close(tiny_base.logits(tiny_base.hidden(tokens)[0]), expected, rtol=1e-4, atol=1e-4)
        tiny_base.use(None)
        assert (tiny_base.logits(tiny_base.hidden(tokens)[0]) - expected).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture: str, tmp_path: Path) -> None:
    """Splitting the forward pass at the head loses nothing, in each supported architecture."""
    path = make_model(tmp_path / "model", architecture)
    base = load_base(SpareConfig(Path("unused"), path, "test", max_sequence_length=64))
    adapter = _adapter(base)
    tokens = torch.from_numpy(_data(24).data[0].tokens)
    expected = merged_logits(plain_model(path), adapter, adapter.factors, tokens)
    base.use(adapter)
    torch.testing.assert_close(base.logits(base.hidden(tokens[None])[0]), expected, rtol=1e-4, atol=1e-4)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """A model whose modules we do not know is refused before it is loaded."""
    from transformers import GPT2Config

    config = GPT2Config()
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unsupported architecture"):
        load_base(SpareConfig(Path("unused"), tmp_path, "test"))


def test_base_too_short_for_the_configured_length(tiny_model: Path) -> None:
    """A configured length beyond the base model's positions is refused at the start."""
    with pytest.raises(ValueError, match="max_sequence_length 2048 exceeds the base model's 1024"):
        load_base(SpareConfig(Path("unused"), tiny_model, "test"))


def test_long_sequences_keep_no_activations(tiny_base: BaseModel) -> None:
    """Beyond the budget each layer runs twice instead of keeping its activations; the result has the same bits."""
    adapter = _adapter(tiny_base)
    data = _data(300)
    calls = []
    layer = tiny_base._layers[0].get_submodule("self_attn")
    with layer.register_forward_hook(lambda *_: calls.append(1)):
        kept = training.forward_backward(tiny_base, adapter, data, budget=300)
        assert len(calls) == 1
        recomputed = training.forward_backward(tiny_base, adapter, data, budget=299)
        assert len(calls) == 3
    assert recomputed[0].to_proto() == kept[0].to_proto()
    assert torch.equal(recomputed[1], kept[1])


def test_bfloat16_base(tiny_base: BaseModel, tiny_model: Path) -> None:
    """With a bfloat16 base the adapter stays float32, and loss and gradient are near those of float32."""
    path = SpareConfig(Path("unused"), tiny_model, "test", dtype="bfloat16", max_sequence_length=512)
    base = load_base(path)
    data = _data(20, 30)
    expected, exact = training.forward_backward(tiny_base, _adapter(tiny_base), data, budget=512)
    outcome, gradient = training.forward_backward(base, _adapter(base), data, budget=512)
    assert gradient.dtype == torch.float32
    assert outcome.loss == pytest.approx(expected.loss, rel=0.05)
    assert (gradient - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([4], 1, [range(1)]),
        ([4, 4, 4], 8, [range(2), range(2, 3)]),
        ([1, 1, 8, 1], 8, [range(2), range(2, 3), range(3, 4)]),
        ([3, 3, 3], 1024, [range(3)]),
        ([5, 9, 9, 2], 18, [range(2), range(2, 4)]),
    ],
)
def test_micro_batches(lengths: list[int], budget: int, expected: list[range]) -> None:
    """Datums stay in order; padded tokens stay within the budget unless one datum alone exceeds it."""
    assert training.plan_micro_batches(lengths, budget) == expected
