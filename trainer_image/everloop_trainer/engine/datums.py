"""From a protobuf ForwardBackwardRequest to checked arrays. Refusals name the field: `data[1].model_input: ...`.

Nothing of the model is touched here, so bad content cannot leave a trace in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from everloop_losses.graph import GraphError, TracedLoss
from everloop_losses.identity import session_of, unpack
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.images import Image
from everloop_trainer.engine.inputs import Limits, at, check_tokens, read_chunks
from everloop_trainer.engine.losses import BY_SLOPE, LOSSES, TRACED, UNSUPPORTED, Loss
from everloop_trainer.engine.tensors import decode, decode_ranked
from everloop_trainer.session.identifiers import TRAINING
from everloop_trainer.tinker_proto import tinker_public

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class TrainingDatum:
    """One sequence: tokens int64 (n,), targets of each position int64 (n,) or (n, K), inputs float32 like targets.

    `traced` are the inputs of a traced loss but the first, in its order; `images` those that tokens stand for.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.float32]]
    traced: tuple[NDArray[Any], ...] = ()
    images: Sequence[Image] = ()


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What one forward_backward is about; with `traced`, `loss` takes what that gives."""

    loss: Loss
    options: Mapping[str, float]
    data: Sequence[TrainingDatum]
    traced: TracedLoss | None = None


def parse_request(body: bytes, limits: Limits) -> TrainingBatch:
    """Decode and check a ForwardBackwardRequest.

    Raises ContentError naming the first field that is wrong.
    """
    try:
        request = tinker_public.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ContentError(f"body: not a ForwardBackwardRequest: {error}") from error
    name = request.loss_fn
    if name == TRACED:
        return _parse_traced(request, limits)
    loss = LOSSES.get(name)
    if loss is None:
        reason = f" ({UNSUPPORTED[name]})" if name in UNSUPPORTED else ""
        raise ContentError(f"loss_fn: {name!r} is not supported{reason}; supported: {', '.join([*LOSSES, TRACED])}")
    options = _options(name, loss, request)
    _check_any(request)
    data = [_parse_datum(f"data[{index}]", name, loss, datum, limits) for index, datum in enumerate(request.data)]
    return TrainingBatch(loss, options, data)


def _check_any(request: Any) -> None:
    if not request.data:
        raise ContentError("data: must hold at least one datum")


def _parse_traced(request: Any, limits: Limits) -> TrainingBatch:
    loss = _traced_loss(request)
    _check_any(request)
    data = [_parse_traced_datum(f"data[{index}]", loss, datum, limits) for index, datum in enumerate(request.data)]
    return TrainingBatch(BY_SLOPE, {}, data, loss)


def _traced_loss(request: Any) -> TracedLoss:
    """The loss that `loss_id` holds, which the session of this model has made."""
    field = "loss_fn_config.loss_id"
    for option in sorted({*request.loss_fn_config, *request.loss_fn_config_v2} - {"loss_id"}):
        raise ContentError(f"loss_fn_config.{option}: not an option of {TRACED}, which has loss_id")
    loss_id = request.loss_fn_config_v2["loss_id"].text
    session, own = session_of(loss_id), request.model_id.partition(TRAINING)[0]
    if session is None:
        raise ContentError(f"{field}: {loss_id[:80]!r} is not the id that create_custom_loss gives a loss")
    if session != own:
        raise ContentError(f"{field}: the loss was made in session {session[:80]!r}, this model in {own!r}")
    try:
        return unpack(loss_id)
    except GraphError as error:
        raise ContentError(f"{field}: {error}") from error


def _parse_traced_datum(field: str, loss: TracedLoss, datum: Any, limits: Limits) -> TrainingDatum:
    """Further inputs are not looked at: the client sends its data as it is."""
    read = read_chunks(f"{field}.model_input", datum.model_input, limits)
    tokens = read.tokens
    logprobs, *others = loss.inputs
    given: Mapping[str, Any] = datum.loss_fn_inputs
    for key in (TARGETS, *(each.name for each in others)):
        if key not in given:
            raise ContentError(f"{field}.loss_fn_inputs.{key}: missing; loss {loss.name!r} needs it")
    targets = _targets(f"{field}.loss_fn_inputs.{TARGETS}", given[TARGETS], len(tokens), limits)
    if targets.ndim != logprobs.rank:
        raise ContentError(
            f"{field}.loss_fn_inputs.{TARGETS}: has rank {targets.ndim}, but loss {loss.name!r} takes logprobs of rank"
            f" {logprobs.rank}"
        )
    inputs = [decode_ranked(f"{field}.loss_fn_inputs.{each.name}", given[each.name], each.rank) for each in others]
    return TrainingDatum(tokens, targets.astype(np.int64), {}, tuple(inputs), read.images)


def _targets(where: str, tensor: Any, length: int, limits: Limits) -> NDArray[Any]:
    targets = decode(where, tensor, length)
    if targets.dtype.kind != "i":
        raise ContentError(f"{where}: must be integers, got float32")
    check_tokens(where, targets, limits)
    return targets


def _options(name: str, loss: Loss, request: Any) -> dict[str, float]:
    """The SDK sends numbers in both maps; the second one counts."""
    given: dict[str, float] = dict(request.loss_fn_config)
    for option, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise ContentError(f"loss_fn_config.{option}: must be a number")
        given[option] = value.number
    for option, number in sorted(given.items()):
        if option not in loss.options:
            known = f"has {', '.join(loss.options)}" if loss.options else "has none"
            raise ContentError(f"loss_fn_config.{option}: not an option of {name}, which {known}")
        if not (math.isfinite(number) and number >= 0):
            raise ContentError(f"loss_fn_config.{option}: must be a finite number from 0 on, got {number}")
    values = {}
    for option, default in loss.options.items():
        value = given.get(option, default)
        if value is None:
            raise ContentError(f"loss_fn_config.{option}: missing; {name} has no default for it")
        values[option] = value
    low, high = values.get("clip_low_threshold", 0.0), values.get("clip_high_threshold", math.inf)
    if low > high:
        raise ContentError(f"loss_fn_config.clip_low_threshold: {low} is above clip_high_threshold {high}")
    return values


def _parse_datum(field: str, name: str, loss: Loss, datum: Any, limits: Limits) -> TrainingDatum:
    read = read_chunks(f"{field}.model_input", datum.model_input, limits)
    tokens = read.tokens
    given: Mapping[str, Any] = datum.loss_fn_inputs
    needed = (TARGETS, *loss.inputs)
    for extra in sorted(set(given) - set(needed)):
        raise ContentError(f"{field}.loss_fn_inputs.{extra}: not an input of {name} ({', '.join(needed)})")
    for key in needed:
        if key not in given:
            raise ContentError(f"{field}.loss_fn_inputs.{key}: missing; {name} needs {', '.join(needed)}")

    where = f"{field}.loss_fn_inputs.{TARGETS}"
    targets = _targets(where, given[TARGETS], len(tokens), limits)
    if targets.ndim > 1 and not loss.several_targets:
        raise ContentError(f"{where}: {name} takes one target for each input token, got shape {targets.shape}")

    inputs = {}
    for key in loss.inputs:
        where = f"{field}.loss_fn_inputs.{key}"
        values = decode(where, given[key], len(tokens)).astype(np.float32)
        if values.shape != targets.shape:
            raise ContentError(f"{where}: shape {values.shape} differs from that of {TARGETS}, {targets.shape}")
        for position in np.argwhere(~np.isfinite(values))[:1]:
            raise ContentError(f"{where}{at(position)}: must be finite, got {values[tuple(position)]}")
        inputs[key] = values
    if loss.of_sequence and inputs["advantages"].any() and not inputs["sequence_ratio_mask"].any():
        raise ContentError(f"{field}.loss_fn_inputs.sequence_ratio_mask: marks no token")
    return TrainingDatum(tokens, targets.astype(np.int64), inputs, images=read.images)
