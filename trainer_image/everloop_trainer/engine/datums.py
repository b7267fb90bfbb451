"""From a protobuf ForwardBackwardRequest to checked arrays. Refusals name the field: `data[1].model_input: ...`.

Nothing of the model is touched here, so bad content cannot leave a trace in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.losses import CROSS_ENTROPY, SUPPORTED
from everloop_trainer.tinker_proto import tinker_public

_NUMPY_TYPES: dict[int, np.dtype[Any]] = {
    tinker_public.DTYPE_FLOAT32: np.dtype("<f4"),
    tinker_public.DTYPE_INT64: np.dtype("<i8"),
    tinker_public.DTYPE_INT32: np.dtype("<i4"),
}
_INPUTS = ("target_tokens", "weights")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the base model can take: token ids below `vocab_size`, at most `max_sequence_length` tokens."""

    vocab_size: int
    max_sequence_length: int


@dataclass(frozen=True, slots=True)
class TrainingDatum:
    """One sequence: tokens int64 (n,), target of each position int64 (n,), and its weight float32 (n,)."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]


def parse_request(body: bytes, limits: Limits) -> list[TrainingDatum]:
    """Decode and check a ForwardBackwardRequest for the loss cross_entropy.

    Raises ContentError naming the first field that is wrong.
    """
    try:
        request = tinker_public.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ContentError(f"body: not a ForwardBackwardRequest: {error}") from error
    if request.loss_fn not in SUPPORTED:
        raise ContentError(f"loss_fn: {request.loss_fn!r} is not supported; supported: {', '.join(SUPPORTED)}")
    for option in sorted({*request.loss_fn_config, *request.loss_fn_config_v2}):
        raise ContentError(f"loss_fn_config.{option}: not an option of {CROSS_ENTROPY}, which has none")
    if not request.data:
        raise ContentError("data: must hold at least one datum")
    return [_parse_datum(f"data[{index}]", datum, limits) for index, datum in enumerate(request.data)]


def _parse_datum(field: str, datum: Any, limits: Limits) -> TrainingDatum:
    tokens = _model_input(f"{field}.model_input", datum.model_input, limits)
    inputs: Mapping[str, Any] = datum.loss_fn_inputs
    for name in sorted(set(inputs) - set(_INPUTS)):
        raise ContentError(f"{field}.loss_fn_inputs.{name}: not an input of {CROSS_ENTROPY} ({', '.join(_INPUTS)})")
    for name in _INPUTS:
        if name not in inputs:
            raise ContentError(f"{field}.loss_fn_inputs.{name}: missing; {CROSS_ENTROPY} needs {', '.join(_INPUTS)}")

    where = f"{field}.loss_fn_inputs.target_tokens"
    targets = _vector(where, inputs["target_tokens"], len(tokens))
    if targets.dtype.kind != "i":
        raise ContentError(f"{where}: must be integers, got float32")
    _check_tokens(where, targets, limits)

    where = f"{field}.loss_fn_inputs.weights"
    weights = _vector(where, inputs["weights"], len(tokens)).astype(np.float32)
    unusable = np.flatnonzero(~np.isfinite(weights))
    if unusable.size:
        raise ContentError(f"{where}[{unusable[0]}]: must be finite, got {weights[unusable[0]]}")
    return TrainingDatum(tokens, targets.astype(np.int64), weights)


def _model_input(field: str, chunks: Any, limits: Limits) -> NDArray[np.int64]:
    parts = []
    for index, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ContentError(f"{field}.chunks[{index}]: {kind} chunks are not supported by this base model")
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise ContentError(f"{field}.chunks[{index}].tokens: {len(data)} bytes are no int32 array")
        parts.append(np.frombuffer(data, "<i4").astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not tokens.size:
        raise ContentError(f"{field}: must hold at least one token")
    if tokens.size > limits.max_sequence_length:
        raise ContentError(f"{field}: {tokens.size} tokens exceed the maximum of {limits.max_sequence_length}")
    _check_tokens(field, tokens, limits)
    return tokens


def _check_tokens(field: str, tokens: NDArray[Any], limits: Limits) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= limits.vocab_size))
    if wrong.size:
        raise ContentError(
            f"{field}[{wrong[0]}]: token id {tokens[wrong[0]]} is outside the vocabulary (0 to {limits.vocab_size - 1})"
        )


def _vector(field: str, tensor: Any, length: int) -> NDArray[Any]:
    """Return a dense one-dimensional tensor of `length` values, one per input token."""
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise ContentError(
            f"{field}: shape {tuple(tensor.shape)} is not supported; give one value per input token, shape ({length},)"
        )
    dtype = _NUMPY_TYPES.get(tensor.dtype)
    if dtype is None:
        raise ContentError(f"{field}: dtype {tensor.dtype} is not supported; use float32 or int64")
    if len(tensor.dense) % dtype.itemsize:
        raise ContentError(f"{field}: {len(tensor.dense)} bytes are no {dtype} array")
    values = np.frombuffer(tensor.dense, dtype)
    if list(tensor.shape) not in ([], [values.size]):
        raise ContentError(f"{field}: shape {tuple(tensor.shape)} does not match its {values.size} values")
    if values.size != length:
        raise ContentError(f"{field}: {values.size} values for {length} input tokens")
    return values
