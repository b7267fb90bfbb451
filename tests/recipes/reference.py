"""What the first step of a recipe must be told: computed by transformers and a few formulas from what it asked.

An adapter begins as nothing, so that until the first optim_step every model is the base model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from everloop_trainer.tinker_proto import tinker_public
from tests.recipes.recorder import Call, Recording

DTYPES: dict[int, np.dtype[Any]] = {
    tinker_public.DTYPE_FLOAT32: np.dtype("<f4"),
    tinker_public.DTYPE_INT64: np.dtype("<i8"),
    tinker_public.DTYPE_INT32: np.dtype("<i4"),
}


@dataclass(frozen=True)
class Told:
    """A loss, and log-probabilities one after the other, as they were told and as they are."""

    what: str
    loss: tuple[float, float]
    logprobs: tuple[NDArray[np.float64], NDArray[np.float64]]


class Reference:
    """The base model as transformers runs it, in float32."""

    def __init__(self, weights: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()

    def scores(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Log-probabilities (length, vocabulary) of what follows each token."""
        with torch.no_grad():
            logits = self._model(input_ids=torch.from_numpy(tokens)[None]).logits[0]
        return torch.log_softmax(logits.double(), dim=-1)

    def passes(self, recording: Recording) -> Iterator[Told]:
        """Each training pass before the first step of its model."""
        for call in before_first_step(recording, "forward_backward"):
            request = tinker_public.ForwardBackwardRequest.FromString(call.body)
            output = tinker_public.ForwardBackwardOutput.FromString(recording.results[call.request_id].content)
            told = np.concatenate([_batched(record.fields["logprobs"]) for record in output.loss_fn_outputs])
            loss, expected = 0.0, []
            for datum in request.data:
                tokens = np.concatenate([np.frombuffer(c.encoded_text.tokens, "<i4") for c in datum.model_input])
                inputs = {name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
                targets = torch.from_numpy(inputs["target_tokens"].astype(np.int64)).reshape(len(tokens), -1)
                picked = self.scores(tokens.astype(np.int64)).gather(1, targets).numpy().reshape(-1)
                loss += _loss(request.loss_fn, picked, {name: value.reshape(-1) for name, value in inputs.items()})
                expected.append(picked)
            yield Told(call.request_id, (output.metrics["loss:sum"], loss), (told, np.concatenate(expected)))

    def samples(self, recording: Recording) -> Iterator[Told]:
        """Each request for samples before the first step of all."""
        for call in before_first_step(recording, "asample"):
            body = json.loads(call.body)
            prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
            response = tinker_public.SampleResponse.FromString(recording.results[call.request_id].content)
            for sequence in response.sequences:
                tokens = np.frombuffer(sequence.tokens, "<i4").astype(np.int64)
                scores = self.scores(np.concatenate([np.array(prompt), tokens]))[len(prompt) - 1 : -1]
                expected = scores.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()
                told = np.frombuffer(sequence.logprobs, "<f4").astype(np.float64)
                yield Told(call.request_id, (0.0, 0.0), (told, expected))


def before_first_step(recording: Recording, name: str) -> list[Call]:
    """Submits of this name that were accepted before any optim_step was."""
    names = [call.name for call in recording.calls]
    end = names.index("optim_step") if "optim_step" in names else len(names)
    return [call for call in recording.calls[:end] if call.name == name]


def _loss(name: str, logprobs: NDArray[np.float64], inputs: dict[str, NDArray[Any]]) -> float:
    if name == "cross_entropy":
        return float(-(logprobs * inputs["weights"]).sum())
    assert name == "importance_sampling"
    return float(-(np.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]).sum())


def _tensor(tensor: Any) -> NDArray[Any]:
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if not tensor.HasField("sparse_csr"):
        return np.frombuffer(tensor.dense, dtype).reshape(shape)
    sparse, dense = tensor.sparse_csr, np.zeros(shape, dtype)
    rows, columns = np.frombuffer(sparse.crow_indices, "<i8"), np.frombuffer(sparse.col_indices, "<i8")
    values = np.frombuffer(sparse.values, dtype)
    for row in range(shape[0]):
        part = slice(rows[row], rows[row + 1])
        dense[row, columns[part]] = values[part]
    return dense


def _batched(tensor: Any) -> NDArray[np.float64]:
    return np.frombuffer(tensor.data, DTYPES[tensor.dtype]).astype(np.float64)
