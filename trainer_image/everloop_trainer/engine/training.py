"""One forward_backward: micro-batches, loss, and the gradient of the active adapter.

Micro-batches follow from the operation's own content, never from what else is queued: the bits of a result depend on
the request, the adapter and the engine's settings alone. Gradients go to a vector of their own, so an operation that
fails half-way has changed nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.datums import TrainingBatch, TrainingDatum
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.lora import Adapter
from everloop_trainer.engine.scores import HEAD_TOKENS, target_logprobs
from everloop_trainer.engine.traced import Evaluation
from everloop_trainer.tinker_proto import tinker_public


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss (summed over all tokens, in float64) and each datum's log-probabilities, float32 in the targets' shape.

    `stands_in_for` as of the Loss; `metrics` are a traced loss's own; `seconds` those of forward and backward.
    """

    loss: float
    logprobs: list[NDArray[np.float32]]
    stands_in_for: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    def to_proto(self) -> bytes:
        """Serialise as ForwardBackwardOutput; equal outcomes give equal bytes."""
        # The SDK reduces metrics by what is behind the colon, over the chunks of a call.
        named = {f"{self.stands_in_for}_stand_in:max": 1.0} if self.stands_in_for else {}
        output = tinker_public.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[
                _record(list(values), shape)
                for shape, values in itertools.groupby(self.logprobs, key=lambda array: array.shape[1:])
            ],
            metrics={"loss:sum": self.loss, **named, **self.metrics},
        )
        return bytes(output.SerializeToString(deterministic=True))


class Laps:
    """Where the time of an operation goes: each part ends where the next begins."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0}
        self._since = time.monotonic()

    def lap(self, part: str) -> None:
        """What was done since the last time was this part; of an accelerator, what the host has waited for."""
        now = time.monotonic()
        self.seconds[part] += now - self._since
        self._since = now


def _record(logprobs: list[NDArray[np.float32]], trailing_shape: tuple[int, ...]) -> Any:
    """Datums in a row whose arrays differ in length alone."""
    batched = tinker_public.BatchedTensor(
        data=b"".join(values.tobytes() for values in logprobs),
        offsets=np.cumsum([0, *(values.nbytes for values in logprobs)], dtype=np.int64).tobytes(),
        dtype=tinker_public.DTYPE_FLOAT32,
        trailing_shape=trailing_shape,
    )
    return tinker_public.ArrayRecord(type_tag="ArrayRecord", fields={"logprobs": batched}, num_datums=len(logprobs))


def plan_micro_batches(lengths: Sequence[int], budget: int) -> list[range]:
    """Cut datums, in their order, into runs of at most `budget` padded tokens (rows x longest), at least one each."""
    runs: list[range] = []
    start = longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > start and (index + 1 - start) * longest > budget:
            runs.append(range(start, index))
            start, longest = index, length
    runs.append(range(start, len(lengths)))
    return runs


@torch.no_grad()
def forward(base: BaseModel, batch: TrainingBatch, budget: int) -> Outcome:
    """Compute loss and log-probabilities with whichever adapter is in use, without gradient.

    Raises ContentError if they are not finite.
    """
    return _run(base, batch, budget)


def forward_backward(
    base: BaseModel, adapter: Adapter, batch: TrainingBatch, budget: int
) -> tuple[Outcome, torch.Tensor]:
    """Like `forward`, with the gradient of the loss, float32 (parameters,) in the order of `adapter.flat`.

    Raises ContentError if loss, log-probabilities or gradient are not finite.
    """
    base.use(adapter)
    gradients = adapter.collect_gradients()
    try:
        with torch.enable_grad():
            outcome = _run(base, batch, budget)
    finally:
        adapter.release_gradients()
    if not torch.isfinite(gradients).all():
        raise ContentError(
            "data: the gradient is not finite: the weights diverged, or the inputs of the loss are too large"
        )
    return outcome, gradients


def _run(base: BaseModel, batch: TrainingBatch, budget: int) -> Outcome:
    loss = 0.0
    logprobs: list[NDArray[np.float32]] = []
    laps = Laps()
    traced = None if batch.traced is None else _Traced(Evaluation(batch.traced))
    for run in plan_micro_batches([len(datum.tokens) for datum in batch.data], budget):
        part = replace(batch, data=[batch.data[index] for index in run])
        part_loss, values = _micro_batch(base, part, budget, traced, laps)
        loss += part_loss
        logprobs += values
    if not np.isfinite(loss) or not all(np.isfinite(values).all() for values in logprobs):
        raise ContentError(
            "data: the loss is not finite: the weights diverged, or the inputs of the loss are too large"
        )
    return Outcome(loss, logprobs, batch.loss.stands_in_for, {} if traced is None else traced.metrics(), laps.seconds)


class _Traced:
    """A traced loss over the datums of one operation, in their order."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._datums = 0
        self._sums: dict[str, float] = {}

    def weigh(self, data: Sequence[TrainingDatum], p: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Evaluate it on the next datums: their loss, and the weight of each log-probability p (positions, K)."""
        weights, total = torch.zeros_like(p), 0.0
        rows = [len(datum.tokens) for datum in data]
        for datum, own, weight in zip(data, p.split(rows), weights.split(rows), strict=True):
            logprobs = own[:, : _width(datum)].reshape(datum.targets.shape)
            told = self._evaluation.run(f"data[{self._datums}]", logprobs, datum.traced)
            if told.slope is not None:
                weight[:, : _width(datum)] = -told.slope.reshape(len(datum.tokens), -1)
            self._datums += 1
            total += told.loss
            for key, value in told.metrics.items():
                self._sums[key] = self._sums.get(key, 0.0) + value
        return total, weights

    def metrics(self) -> dict[str, float]:
        """Of all datums so far: sums, and means over datums, as the SDK forms them."""
        return {key: value / (self._datums if key.endswith(":mean") else 1) for key, value in self._sums.items()}


def _micro_batch(
    base: BaseModel, batch: TrainingBatch, budget: int, traced: _Traced | None, laps: Laps
) -> tuple[float, list[NDArray[np.float32]]]:
    """Run one micro-batch; with gradients enabled, add to those of the active adapter."""
    lengths = [len(datum.tokens) for datum in batch.data]
    tokens = np.zeros((len(lengths), max(lengths)), np.int64)
    for row, datum in zip(tokens, batch.data, strict=True):
        row[: len(datum.tokens)] = datum.tokens
    ids = torch.from_numpy(tokens)
    sight = base.see(ids, [datum.images for datum in batch.data])
    padded = base.hidden(ids, recompute=tokens.size > budget, sight=sight)
    hidden = torch.cat([row[:length] for row, length in zip(padded, lengths, strict=True)])
    targets, inputs = _columns(batch.data)

    # The head runs in slices that are differentiated one by one: logits of the whole batch never exist at once.
    boundary = hidden.detach().requires_grad_(torch.is_grad_enabled())
    parts = [slice(start, start + HEAD_TOKENS) for start in range(0, len(targets), HEAD_TOKENS)]
    traced_loss = None
    if traced is not None:
        traced_loss, inputs["weights"] = traced.weigh(batch.data, _logprobs(base, boundary, targets))
    if batch.loss.of_sequence:
        p = _logprobs(base, boundary, targets)
        cut = {name: values.split(lengths) for name, values in inputs.items()}
        found = [
            batch.loss.of_sequence(values, {name: cut[name][index] for name in cut})
            for index, values in enumerate(p.split(lengths))
        ]
        inputs = {**inputs, **{name: torch.cat([each[name] for each in found]) for name in found[0]}}
    loss, logprobs = 0.0, []
    for part in parts:
        here = {name: values[part] for name, values in inputs.items()}
        part_loss, values = _head(base, batch, boundary[part], targets[part], here, laps)
        loss += part_loss
        logprobs.append(values)
    if hidden.requires_grad:
        hidden.backward(boundary.grad)
        laps.lap("backward")
    rows = torch.cat(logprobs).split(lengths)
    return loss if traced_loss is None else traced_loss, [
        values[:, : _width(datum)].reshape(datum.targets.shape).numpy()
        for values, datum in zip(rows, batch.data, strict=True)
    ]


@torch.no_grad()
def _logprobs(base: BaseModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities float32 (positions, K) of targets, in slices as `_head` has them."""
    parts = [slice(start, start + HEAD_TOKENS) for start in range(0, len(targets), HEAD_TOKENS)]
    return torch.cat([target_logprobs(base.logits(hidden[part]), targets[part])[0] for part in parts])


def _columns(data: Sequence[TrainingDatum]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Targets int64 and inputs float32 of all datums, (positions, K) each; what is filled up weighs nothing."""
    width = max(map(_width, data))

    def stack(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
        filled = [
            np.pad(array.reshape(len(array), -1), ((0, 0), (0, width - _width(datum))))
            for array, datum in zip(arrays, data, strict=True)
        ]
        return torch.from_numpy(np.concatenate(filled))

    names = data[0].inputs
    return stack([datum.targets for datum in data]), {
        name: stack([each.inputs[name] for each in data]) for name in names
    }


def _width(datum: TrainingDatum) -> int:
    return 1 if datum.targets.ndim == 1 else int(datum.targets.shape[1])


def _head(
    base: BaseModel,
    batch: TrainingBatch,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    laps: Laps,
) -> tuple[float, torch.Tensor]:
    """Return loss and log-probabilities float32 (n, K) of `targets` after hidden states (n, hidden).

    With gradients enabled, backpropagates d loss / d logits = sum over K of (onehot - softmax) * d loss / d logprob.
    """
    logits = base.logits(hidden)
    scores = logits.detach()
    logprobs, normaliser = target_logprobs(scores, targets)
    logprobs.requires_grad_(logits.requires_grad)
    loss = batch.loss.objective(logprobs, inputs, batch.options)
    total = loss.detach().sum(dtype=torch.float64).item()
    laps.lap("forward")
    if logits.requires_grad:
        (slope,) = torch.autograd.grad(loss.sum(), logprobs)
        with torch.no_grad():
            # Nothing needs the logits any more: their memory becomes their gradient.
            scores.sub_(normaliser).exp_().mul_(-slope.sum(1, keepdim=True))
            scores.scatter_add_(1, targets, slope)
        logits.backward(scores)
        laps.lap("backward")
    return total, logprobs.detach()
