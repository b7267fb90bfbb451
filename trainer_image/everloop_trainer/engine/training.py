"""One forward_backward: micro-batches, loss, and the gradient of the active adapter.

Micro-batches follow from the operation's own content, never from what else is queued: the bits of a result depend on
the request, the adapter and the engine's settings alone. Gradients go to a vector of their own, so an operation that
fails half-way has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from everloop_trainer.engine import losses
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.datums import TrainingDatum
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.lora import Adapter
from everloop_trainer.tinker_proto import tinker_public

HEAD_TOKENS = 256
"""Positions whose logits (float32, positions x vocabulary) exist at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss (summed over all tokens, in float64) and log-probability of each target, float32 (n,) per datum."""

    loss: float
    logprobs: list[NDArray[np.float32]]

    def to_proto(self) -> bytes:
        """Serialise as ForwardBackwardOutput; equal outcomes give equal bytes."""
        lengths = [values.nbytes for values in self.logprobs]
        batched = tinker_public.BatchedTensor(
            data=b"".join(values.tobytes() for values in self.logprobs),
            offsets=np.cumsum([0, *lengths], dtype=np.int64).tobytes(),
            dtype=tinker_public.DTYPE_FLOAT32,
        )
        record = tinker_public.ArrayRecord(
            type_tag="ArrayRecord", fields={"logprobs": batched}, num_datums=len(self.logprobs)
        )
        output = tinker_public.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": self.loss}
        )
        return bytes(output.SerializeToString(deterministic=True))


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
def forward(base: BaseModel, data: Sequence[TrainingDatum], budget: int) -> Outcome:
    """Compute loss and log-probabilities with whichever adapter is in use, without gradient.

    Raises ContentError if they are not finite.
    """
    return _run(base, data, budget)


def forward_backward(
    base: BaseModel, adapter: Adapter, data: Sequence[TrainingDatum], budget: int
) -> tuple[Outcome, torch.Tensor]:
    """Like `forward`, with the gradient of the loss, float32 (parameters,) in the order of `adapter.flat`.

    Raises ContentError if loss, log-probabilities or gradient are not finite.
    """
    base.use(adapter)
    gradients = adapter.collect_gradients()
    try:
        with torch.enable_grad():
            outcome = _run(base, data, budget)
    finally:
        adapter.release_gradients()
    if not torch.isfinite(gradients).all():
        raise ContentError("data: the gradient is not finite: the weights diverged, or the loss weights are too large")
    return outcome, gradients


def _run(base: BaseModel, data: Sequence[TrainingDatum], budget: int) -> Outcome:
    loss = 0.0
    logprobs: list[NDArray[np.float32]] = []
    for run in plan_micro_batches([len(datum.tokens) for datum in data], budget):
        batch = [data[index] for index in run]
        batch_loss, values = _micro_batch(base, batch, budget)
        loss += batch_loss
        logprobs += np.split(values, np.cumsum([len(datum.tokens) for datum in batch])[:-1])
    if not np.isfinite(loss) or not all(np.isfinite(values).all() for values in logprobs):
        raise ContentError("data: the loss is not finite: the weights diverged, or the loss weights are too large")
    return Outcome(loss, logprobs)


def _micro_batch(base: BaseModel, batch: Sequence[TrainingDatum], budget: int) -> tuple[float, NDArray[np.float32]]:
    """Run one micro-batch; with gradients enabled, add to those of the active adapter."""
    lengths = [len(datum.tokens) for datum in batch]
    tokens = np.zeros((len(batch), max(lengths)), np.int64)
    for row, datum in zip(tokens, batch, strict=True):
        row[: len(datum.tokens)] = datum.tokens
    padded = base.hidden(torch.from_numpy(tokens), recompute=tokens.size > budget)
    hidden = torch.cat([row[:length] for row, length in zip(padded, lengths, strict=True)])
    targets = torch.from_numpy(np.concatenate([datum.targets for datum in batch]))
    weights = torch.from_numpy(np.concatenate([datum.weights for datum in batch]))

    # The head runs in slices that are differentiated one by one: logits of the whole batch never exist at once.
    boundary = hidden.detach().requires_grad_(torch.is_grad_enabled())
    loss, logprobs = 0.0, []
    for start in range(0, len(targets), HEAD_TOKENS):
        part = slice(start, start + HEAD_TOKENS)
        part_loss, values = _head(base, boundary[part], targets[part], weights[part])
        loss += part_loss
        logprobs.append(values.numpy())
    if hidden.requires_grad:
        hidden.backward(boundary.grad)
    return loss, np.concatenate(logprobs)


def _head(
    base: BaseModel, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Return loss and log-probabilities float32 (n,) of `targets` after hidden states (n, hidden).

    With gradients enabled, backpropagates d loss / d logits = (onehot - softmax) * d loss / d logprob.
    """
    logits = base.logits(hidden)
    scores = logits.detach()
    normaliser = torch.logsumexp(scores, dim=-1, keepdim=True)
    logprobs = (scores.gather(1, targets[:, None]) - normaliser)[:, 0]
    logprobs.requires_grad_(logits.requires_grad)
    loss = losses.cross_entropy(logprobs, weights)
    total = loss.detach().sum(dtype=torch.float64).item()
    if logits.requires_grad:
        (slope,) = torch.autograd.grad(loss.sum(), logprobs)
        with torch.no_grad():
            # Nothing needs the logits any more: their memory becomes their gradient.
            scores.sub_(normaliser).exp_().mul_(-slope[:, None])
            scores.scatter_add_(1, targets[:, None], slope[:, None])
        logits.backward(scores)
    return total, logprobs.detach()
