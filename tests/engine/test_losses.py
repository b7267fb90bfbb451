"""Each loss has the value and gradient of its published formula, as the SDK sends inputs and reads outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from numpy.typing import NDArray
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from everloop_trainer.engine import training
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.datums import TrainingBatch, parse_request
from everloop_trainer.engine.inputs import Limits
from everloop_trainer.engine.lora import Adapter, LoraSpec
from everloop_trainer.engine.losses import LOSSES, UNSUPPORTED
from everloop_trainer.server.submissions import STAND_INS
from tests.engine.client import LORA, Engine
from tests.engine.models import VOCABULARY
from tests.engine.reference import Objective, loss_and_gradient, plain_model, randomise

LIMITS = Limits(VOCABULARY, 512)
ALL = LoraSpec(rank=4, seed=5, train_mlp=True, train_attn=True, train_unembed=True)
LENGTHS = (5, 300, 1, 40)


def clip(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.minimum(torch.maximum(ratio, torch.tensor(low)), torch.tensor(high))


def gspo(p: torch.Tensor, x: dict[str, torch.Tensor], low: float, high: float) -> torch.Tensor:
    marked = x["sequence_ratio_mask"] != 0
    mean = (p.detach() - x["logprobs"])[marked].mean()
    ratio = torch.exp(mean) * torch.exp(p - p.detach())
    return -torch.minimum(ratio * x["advantages"], clip(ratio, low, high) * x["advantages"]).sum()


def ppo(p: torch.Tensor, x: dict[str, torch.Tensor], low: float, high: float) -> torch.Tensor:
    ratio = torch.exp(p - x["logprobs"])
    return -torch.minimum(ratio * x["advantages"], clip(ratio, low, high) * x["advantages"]).sum()


def cispo(p: torch.Tensor, x: dict[str, torch.Tensor], low: float, high: float) -> torch.Tensor:
    return -(clip(torch.exp(p - x["logprobs"]), low, high).detach() * p * x["advantages"]).sum()


def dro(p: torch.Tensor, x: dict[str, torch.Tensor], beta: float) -> torch.Tensor:
    return -(p * x["advantages"] - beta / 2 * (p - x["logprobs"]).square()).sum()


def stand_in(p: torch.Tensor, x: dict[str, torch.Tensor], low: float, high: float, kl: float) -> torch.Tensor:
    ratio = torch.exp(p - x["logprobs"])
    kept = clip(ratio, low, high).detach() * p * x["advantages"]
    divergence = torch.where(x["advantages"] != 0, 1 / ratio - 1 + torch.log(ratio), 0.0)
    return (kl * divergence - kept).sum()


FORMULAS: dict[str, tuple[str, dict[str, float], Objective]] = {
    "cross_entropy": ("cross_entropy", {}, lambda p, x: -(p * x["weights"]).sum()),
    "importance_sampling": (
        "importance_sampling",
        {},
        lambda p, x: -(torch.exp(p - x["logprobs"]) * x["advantages"]).sum(),
    ),
    "ppo": ("ppo", {}, lambda p, x: ppo(p, x, 0.8, 1.2)),
    "ppo, narrower": (
        "ppo",
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01},
        lambda p, x: ppo(p, x, 0.95, 1.01),
    ),
    "cispo": ("cispo", {}, lambda p, x: cispo(p, x, 0.0, 4.0)),
    "cispo, narrower": (
        "cispo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        lambda p, x: cispo(p, x, 0.9, 1.1),
    ),
    "dro": ("dro", {"beta": 0.05}, lambda p, x: dro(p, x, 0.05)),
    "gspo": ("gspo", {}, lambda p, x: gspo(p, x, 1 - 3e-4, 1 + 4e-4)),
    "gspo, wider": (
        "gspo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2},
        lambda p, x: gspo(p, x, 0.9, 1.2),
    ),
    "stable_reinforce_stand_in": ("stable_reinforce_stand_in", {}, lambda p, x: stand_in(p, x, 0.0, 2.0, 0.0)),
    "stable_reinforce_stand_in, kept near": (
        "stable_reinforce_stand_in",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.1, "kl_coeff": 0.7},
        lambda p, x: stand_in(p, x, 0.8, 1.1, 0.7),
    ),
}


@pytest.fixture(scope="module")
def adapter(tiny_base: BaseModel) -> Adapter:
    adapter = Adapter(ALL, tiny_base.targets)
    adapter.initialise()
    randomise(adapter)
    return adapter


def sampled(base: BaseModel, adapter: Adapter, spread: float) -> list[tinker.Datum]:
    """Completions after prompts of half their length, with q near p: ratios within and beyond each bound."""
    generator = np.random.default_rng(3)
    data = []
    for length in LENGTHS:
        tokens, targets = generator.integers(0, VOCABULARY, (2, length))
        base.use(adapter)
        with torch.no_grad():
            logits = base.logits(base.hidden(torch.from_numpy(tokens)[None])[0])
        p = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(targets)[:, None])[:, 0].numpy()
        counts = np.arange(length) >= length // 2
        given = {
            "target_tokens": targets,
            "logprobs": np.where(counts, p + generator.normal(scale=spread, size=length), 0.0).astype(np.float32),
            "advantages": np.where(counts, generator.normal(size=length), 0.0).astype(np.float32),
            "sequence_ratio_mask": counts.astype(np.float32),
            "weights": generator.normal(size=length).astype(np.float32),
        }
        tensors = {name: tinker.TensorData.from_numpy(values) for name, values in given.items()}
        data.append(tinker.Datum(tinker.ModelInput.from_ints(tokens.tolist()), tensors))
    return data


def encoded(data: list[tinker.Datum], loss_fn: str, options: dict[str, float]) -> bytes:
    """A request as the SDK encodes it."""
    inputs = types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=options)
    request = types.ForwardBackwardRequest(forward_backward_input=inputs, model_id="m", seq_id=1)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


def only(data: list[tinker.Datum], loss_fn: str) -> list[tinker.Datum]:
    """With the inputs that this loss takes."""
    names = ("target_tokens", *LOSSES[loss_fn].inputs)
    return [tinker.Datum(each.model_input, {name: each.loss_fn_inputs[name] for name in names}) for each in data]


@pytest.mark.parametrize("case", FORMULAS)
def test_value_and_gradient_are_those_of_the_formula(
    tiny_base: BaseModel, tiny_model: Path, adapter: Adapter, case: str
) -> None:
    """Sums over tokens and datums; several micro-batches and slices of the head; prompts count nothing."""
    loss_fn, options, objective = FORMULAS[case]
    data = only(sampled(tiny_base, adapter, 5e-4 if case == "gspo" else 0.3), loss_fn)
    batch = parse_request(encoded(data, loss_fn, options), LIMITS)
    loss, logprobs, gradient = loss_and_gradient(plain_model(tiny_model), adapter, batch.data, objective)
    outcome, found = training.forward_backward(tiny_base, adapter, batch, budget=128)
    assert outcome.loss == pytest.approx(loss, rel=1e-4, abs=1e-3)
    for ours, theirs in zip(outcome.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-4)
    assert (found - gradient).norm() < 1e-4 * gradient.norm()
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_gradient_is_the_slope_of_the_value(loss_fn: str) -> None:
    """Finite differences in float64; where a ratio has no gradient by definition, what is left."""
    loss = LOSSES[loss_fn]
    generator = torch.Generator().manual_seed(7)
    p = -torch.rand((6, 1), generator=generator, dtype=torch.float64) - 0.5
    offsets = torch.tensor([0.05, -0.05, 0.6, -0.6, 2.0, -2.0], dtype=torch.float64)[:, None]
    inputs = {
        "weights": torch.randn((6, 1), generator=generator, dtype=torch.float64),
        "logprobs": p - offsets,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=torch.float64)[:, None],
        "sequence_ratio_mask": torch.ones((6, 1), dtype=torch.float64),
    }
    options = {name: 0.1 if default is None else default for name, default in loss.options.items()}
    if loss.of_sequence:
        inputs |= loss.of_sequence(p, inputs)
    values = p.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss.objective(values, inputs, options).sum(), values)
    step = 1e-6
    if loss_fn in ("cispo", "stable_reinforce_stand_in"):  # the ratio has no gradient
        ratio = torch.exp(offsets).clamp(options["clip_low_threshold"], options["clip_high_threshold"])
        torch.testing.assert_close(slope, -ratio * inputs["advantages"])
        return
    if loss_fn == "gspo":  # the sequence's ratio is a constant to each token
        inside = (offsets.mean().exp() > options["clip_low_threshold"]) & (
            offsets.mean().exp() < options["clip_high_threshold"]
        )
        assert bool(inside)
        torch.testing.assert_close(slope, -offsets.mean().exp() * inputs["advantages"])
        return
    above, below = (loss.objective(p + change, inputs, options) for change in (step, -step))
    torch.testing.assert_close(slope, (above - below) / (2 * step), rtol=1e-6, atol=1e-6)


def test_what_does_not_count_may_be_anything(tiny_base: BaseModel, adapter: Adapter) -> None:
    """A position, or a whole datum, with advantage 0 whose ratio is beyond float32 spoils nothing."""
    for loss_fn in ("importance_sampling", "ppo", "cispo", "gspo"):
        data = only(sampled(tiny_base, adapter, 5e-4), loss_fn)
        batch = parse_request(encoded(data, loss_fn, {}), LIMITS)
        batch.data[0].inputs["advantages"].fill(0)
        expected, gradient = training.forward_backward(tiny_base, adapter, batch, budget=512)
        prompt = [{name: values.copy() for name, values in datum.inputs.items()} for datum in batch.data]
        prompt[0]["logprobs"].fill(-1e4)
        for inputs in prompt[1:]:
            inputs["logprobs"][: len(inputs["logprobs"]) // 2] = -1e4
        changed = TrainingBatch(
            batch.loss,
            batch.options,
            [
                type(datum)(datum.tokens, datum.targets, inputs)
                for datum, inputs in zip(batch.data, prompt, strict=True)
            ],
        )
        outcome, found = training.forward_backward(tiny_base, adapter, changed, budget=512)
        assert outcome.to_proto() == expected.to_proto()
        assert torch.equal(found, gradient)


def soft_targets(sparse: bool) -> tuple[list[tinker.Datum], list[NDArray[np.float32]]]:
    """Datums with 1, 7 and no K targets for each position, most of weight 0; the weights as they are, densely."""
    generator = np.random.default_rng(5)
    data, dense = [], []
    for length, width in ((6, 7), (20, 7), (4, None), (9, 1)):
        shape = (length,) if width is None else (length, width)
        targets = generator.integers(1, VOCABULARY, shape)
        weights = np.where(generator.random(shape) < 0.3, generator.normal(size=shape), 0).astype(np.float32)
        targets = np.where(weights != 0, targets, 0)
        dense.append(weights)
        tensors = {"target_tokens": torch.from_numpy(targets), "weights": torch.from_numpy(weights)}
        given = tensors if sparse else {name: tinker.TensorData.from_torch(each) for name, each in tensors.items()}
        data.append(
            tinker.Datum(tinker.ModelInput.from_ints(generator.integers(0, VOCABULARY, length).tolist()), given)
        )
    return data, dense


def test_several_targets_of_a_position(tiny_base: BaseModel, tiny_model: Path, adapter: Adapter) -> None:
    """Soft targets, dense or sparse, equal the formula; the SDK reads each datum's log-probabilities in its shape."""
    outputs = []
    for sparse in (True, False):
        data, dense = soft_targets(sparse)
        assert any(each.loss_fn_inputs["weights"].sparse_crow_indices is not None for each in data) == sparse
        batch = parse_request(encoded(data, "cross_entropy", {}), LIMITS)
        for datum, weights in zip(batch.data, dense, strict=True):
            np.testing.assert_array_equal(datum.inputs["weights"], weights)
        objective: Objective = lambda p, x: -(p * x["weights"]).sum()  # noqa: E731
        loss, logprobs, gradient = loss_and_gradient(plain_model(tiny_model), adapter, batch.data, objective)
        outcome, found = training.forward_backward(tiny_base, adapter, batch, budget=64)
        assert outcome.loss == pytest.approx(loss, rel=1e-5, abs=1e-4)
        assert (found - gradient).norm() < 1e-4 * gradient.norm()
        read = deserialize_forward_backward_output(outcome.to_proto()).loss_fn_outputs
        for datum, given, theirs in zip(read, batch.data, logprobs, strict=True):
            assert datum["logprobs"].to_numpy().shape == given.targets.shape
            np.testing.assert_allclose(datum["logprobs"].to_numpy(), theirs.numpy(), rtol=1e-5, atol=1e-4)
        outputs.append(outcome.to_proto())
    assert outputs[0] == outputs[1]


def test_what_stands_in_for_a_loss_is_served_and_says_so() -> None:
    """By the name that the server gives to the engine, and for no loss that is served itself."""
    for loss_fn, stand_in in STAND_INS.items():
        assert LOSSES[stand_in].stands_in_for == loss_fn
        assert loss_fn not in LOSSES
        assert loss_fn in UNSUPPORTED


def test_an_engine_takes_every_loss(tiny_spare: Path, tiny_base: BaseModel, adapter: Adapter) -> None:
    """Over the engine's own socket."""
    data = sampled(tiny_base, adapter, 0.3)
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        for seq, (loss_fn, options, _) in enumerate(FORMULAS.values(), 1):
            body = encoded(only(data, loss_fn), loss_fn, options)
            _, output = engine.call("forward_backward", body, model="m", seq=seq, forward_only=False)
            metrics = deserialize_forward_backward_output(output).metrics
            assert np.isfinite(metrics.pop("loss:sum"))
            stands_in = loss_fn == "stable_reinforce_stand_in"
            assert metrics == ({"stable_reinforce_stand_in:max": 1.0} if stands_in else {})


def test_documentation_has_every_loss_with_its_defaults() -> None:
    """Who reads docs/losses.md sees what is served."""
    rows = (Path(__file__).parents[2] / "docs/losses.md").read_text().splitlines()
    for name, loss in LOSSES.items():
        (row,) = [row for row in rows if row.startswith(f"| `{name}`")]
        for option, default in loss.options.items():
            assert (
                f"`{option}` ({'no default' if default is None else f'{default:.4g}' if default % 1 else default}"
                in row
            )
