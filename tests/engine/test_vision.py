"""Training on images: the numbers are those of transformers and PEFT, whatever else is in the batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import set_peft_model_state_dict

from everloop_trainer import archives
from everloop_trainer.engine import training
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.datums import TrainingBatch, parse_request
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.inputs import read_chunks
from everloop_trainer.engine.lora import Adapter, LoraSpec
from tests.engine.client import put, request
from tests.engine.reference import randomise
from tests.engine.seeing import Part, chunks, picture, plain_inputs, plain_seeing_model
from tests.engine.test_export import ABOUT, stored
from tests.server.tinyvision import END, START

SPEC = LoraSpec(rank=4, seed=5, train_mlp=True, train_attn=True, train_unembed=False)
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WIDE, HIGH, SMALL = picture(300, 40, 1), picture(40, 90, 2, "jpeg"), picture(5, 5, 3, mode="RGBA")
TEXTS: tuple[tuple[Part, ...], ...] = (
    ([3, 9, 27, 81, 243],),
    ([10, START], WIDE, [END, 20, 30, 40]),
    ([START], HIGH, [END, 7, START], SMALL, [END, 8, 9, 10, 11]),
    (WIDE, [5], HIGH),
    ([*range(40)],),
)


def _datum(parts: Sequence[Part], length: int, seed: int) -> Any:
    generator = np.random.default_rng(seed)
    message = chunks(*parts)
    put(message, "target_tokens", generator.integers(0, 256, length))
    put(message, "weights", generator.normal(size=length).astype(np.float32))
    return message


@pytest.fixture(scope="module")
def inputs(seeing_model: Path) -> list[dict[str, torch.Tensor]]:
    """What the model's own processor makes of the texts."""
    return [plain_inputs(seeing_model, *parts) for parts in TEXTS]


@pytest.fixture(scope="module")
def batch(seeing_base: BaseModel, inputs: list[dict[str, torch.Tensor]]) -> TrainingBatch:
    """All of them as one request."""
    lengths = [each["input_ids"].shape[1] for each in inputs]
    data = [_datum(parts, length, seed) for seed, (parts, length) in enumerate(zip(TEXTS, lengths, strict=True))]
    return parse_request(request(*data), seeing_base.limits)


@pytest.fixture(scope="module")
def adapter(seeing_base: BaseModel) -> Adapter:
    """With values like those of a trained one."""
    found = Adapter(SPEC, seeing_base.targets)
    found.initialise()
    randomise(found)
    return found


@pytest.fixture(scope="module")
def reference(
    seeing_model: Path, inputs: list[dict[str, torch.Tensor]], batch: TrainingBatch, adapter: Adapter
) -> tuple[float, list[torch.Tensor], torch.Tensor]:
    """Loss, log-probabilities and gradient, as PEFT and transformers compute them one sequence after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what PEFT calls in transformers
        peft = get_peft_model(plain_seeing_model(seeing_model), LoraConfig(r=4, lora_alpha=32, target_modules=NAMES))
    ours = {each.key: adapter.flat[each.start : each.stop].view(each.shape) for each in adapter.entries}
    assert not set_peft_model_state_dict(peft, ours).unexpected_keys
    total, logprobs = torch.zeros(()), []
    for datum, given in zip(batch.data, inputs, strict=True):
        assert datum.tokens.tolist() == given["input_ids"][0].tolist()
        scores = torch.log_softmax(peft.eval()(**given).logits[0], -1)
        logprobs.append(scores.gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0])
        total = total - (logprobs[-1] * torch.from_numpy(datum.inputs["weights"])).sum()
    total.backward()
    named = {name.replace(".default.", "."): leaf.grad for name, leaf in peft.named_parameters() if "lora_" in name}
    gradient = torch.cat([named[each.key].reshape(-1) for each in adapter.entries])
    return total.item(), [each.detach() for each in logprobs], gradient


@pytest.mark.parametrize("budget", [1, 64, 4096], ids=["recomputed", "several", "one"])
def test_loss_and_gradient_are_those_of_transformers_and_peft(
    seeing_base: BaseModel,
    batch: TrainingBatch,
    adapter: Adapter,
    reference: tuple[float, list[torch.Tensor], torch.Tensor],
    budget: int,
) -> None:
    """Of text and images in one batch, in one micro-batch or several, with activations kept or computed again."""
    total, logprobs, gradient = reference
    outcome, found = training.forward_backward(seeing_base, adapter, batch, budget)
    assert outcome.loss == pytest.approx(total, rel=1e-5, abs=1e-4)
    for one, other in zip(outcome.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-4)
    assert (found - gradient).abs().max() < 1e-4 * gradient.abs().max()
    assert gradient.abs().max() > 0.1


def test_a_datum_has_the_numbers_that_it_has_alone(
    seeing_base: BaseModel, batch: TrainingBatch, adapter: Adapter
) -> None:
    """Neither text nor images beside it count; and twice the same batch is the same bits."""
    together, gradient = training.forward_backward(seeing_base, adapter, batch, 4096)
    again, same = training.forward_backward(seeing_base, adapter, batch, 4096)
    assert again.to_proto() == together.to_proto()
    assert torch.equal(gradient, same)
    alone = torch.zeros_like(gradient)
    for datum, expected in zip(batch.data, together.logprobs, strict=True):
        outcome, part = training.forward_backward(
            seeing_base, adapter, TrainingBatch(batch.loss, batch.options, [datum]), 4096
        )
        np.testing.assert_allclose(outcome.logprobs[0], expected, rtol=1e-5, atol=1e-5)
        alone += part
    torch.testing.assert_close(alone, gradient, rtol=1e-4, atol=1e-5)


def test_images_count(seeing_base: BaseModel, adapter: Adapter) -> None:
    """Another picture of the same size, or the same ones in another order, gives other log-probabilities."""
    seeing_base.use(adapter)

    def logprobs(*images: bytes) -> Any:
        data = _datum(([START], images[0], [END, START], images[1], [END, 5, 6, 7]), 39, 1)
        return training.forward(seeing_base, parse_request(request(data), seeing_base.limits), 4096).logprobs[0]

    one, other, third = (picture(64, 64, seed) for seed in range(3))
    found = logprobs(one, other)
    for changed in (logprobs(one, third), logprobs(other, one)):
        assert np.abs(changed[-3:] - found[-3:]).max() > 0.01
    np.testing.assert_array_equal(logprobs(one, third)[:17], found[:17])


def test_nothing_of_what_sees_is_trained(seeing_base: BaseModel) -> None:
    """Adapters are on the language part and the head alone."""
    names = [target.name for target in seeing_base.targets]
    assert len(names) == 3 * 7 + 1
    assert all(name.startswith("model.language_model.layers.") for name in names if name != "lm_head")


def test_an_exported_adapter_sees_in_peft(
    seeing_base: BaseModel, seeing_model: Path, inputs: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """Its directory is one that PEFT loads, by the card's own words, with the engine's logits; so is its archive."""
    adapter = stored(tmp_path, seeing_base, replace(SPEC, train_unembed=True))
    card = (tmp_path / "README.md").read_bytes()
    assert b"base = AutoModelForImageTextToText.from_pretrained" in card
    parts = archives.archive(tmp_path / "state.safetensors", ABOUT)
    assert card in b"".join(archives.read(parts, 0, archives.size(parts)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, on names in transformers and on a tied head
        peft = PeftModel.from_pretrained(plain_seeing_model(seeing_model), tmp_path).eval()
    read = read_chunks("here", chunks(*TEXTS[2]).model_input, seeing_base.limits)
    tokens = torch.from_numpy(read.tokens)[None]
    seeing_base.use(adapter)
    with torch.no_grad():
        sight = seeing_base.see(tokens, [read.images])
        found = seeing_base.logits(seeing_base.hidden(tokens, sight=sight)[0])
        torch.testing.assert_close(found, peft(**inputs[2]).logits[0], rtol=1e-5, atol=1e-4)


def test_a_damaged_image_changes_nothing(seeing_base: BaseModel, batch: TrainingBatch, adapter: Adapter) -> None:
    """It is found when its turn comes, named by its place, and the adapter has no gradient of what came before."""
    cut = picture(60, 60, 4)[:-40]
    data = [_datum(([5, 6],), 2, 0), _datum(([START], cut, [END]), 18, 1)]
    with pytest.raises(ContentError, match=r"^data\[1\]\.model_input\.chunks\[1\]\.data: not a whole png image: "):
        training.forward_backward(seeing_base, adapter, parse_request(request(*data), seeing_base.limits), 4)
    assert all(leaf.grad is None for pair in adapter.factors.values() for leaf in pair)
