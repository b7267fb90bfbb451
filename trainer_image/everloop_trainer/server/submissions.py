"""From a decoded request body to the operation it asks for. Pure.

A request that has an address (stream and number) always becomes an operation. If its content cannot be served it is
`Refused`, takes its turn and ends as a user error: a 4xx at submit would make the SDK wait for ever. Only a body
without an address raises `Undecodable`.
"""

from __future__ import annotations

import array
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from everloop_http.json_bodies import LARGEST, MOST_OF_A_SESSION
from everloop_trainer import sealing
from everloop_trainer.server import schemas
from everloop_trainer.session import identifiers
from everloop_trainer.session.operations import (
    WEIGHTS_OF_SAMPLER,
    Arguments,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    PromptTargets,
    Refused,
    Sample,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from everloop_trainer.session.times import refuse_ttl
from everloop_trainer.tinker_proto import tinker_public

MAX_SAMPLES = 1024
"""Continuations in one sample request."""

STAND_INS: Mapping[str, str] = MappingProxyType({"stable_reinforce": "stable_reinforce_stand_in"})
"""Losses whose definition is not published, and those that a platform may have taken for them."""

MAX_LEARNING_RATE = 100.0
"""A step of Adam moves each weight by about as much, whatever the gradient is; weights begin below 1."""

MOST_PROMPT_TOKENS = 2**20
"""Tokens of a prompt that are looked at: more than any context window has."""

_ASSET = "image_asset_pointer"

LONGEST_PATH = 400
"""Characters of a path that an error message repeats."""

LONGEST_ERROR = 2000
"""Characters of an error message, which may repeat what a client wrote."""

_SESSION = re.compile(r"[a-z0-9-]{1,63}")
_MODEL = re.compile(rf"[a-z0-9-]{{1,63}}{identifiers.TRAINING}[0-9]{{1,18}}")
_SAMPLER = re.compile(rf"[a-z0-9-]{{1,63}}{identifiers.SAMPLING}[0-9]{{1,18}}")

_Request = TypeVar("_Request", bound=BaseModel)
Body = Mapping[str, Any]


class Undecodable(Exception):
    """The body names no operation; the message says which field is missing or wrong."""


class _ContentError(Exception):
    """The content of an addressed request cannot be served."""


def create_model(body: Body) -> Operation:
    """SDK CreateModelRequest."""
    stream = _new_model(body)
    return Operation(stream, identifiers.CREATION, _content(CreateModel.KIND, lambda: _create_model(body)))


def forward_backward(message: Any, body: bytes, *, stand_ins: bool = False) -> Operation:
    """`message` is the parsed ForwardBackwardRequest of `body`; with `stand_ins`, what stands in for its loss is meant.

    That is settled here, before it is journaled: what is run again later is what was run first.
    """
    if stand_ins and message.loss_fn in STAND_INS:
        message.loss_fn = STAND_INS[message.loss_fn]
        body = message.SerializeToString()
    stream, seq = _address({"model_id": message.model_id, "seq_id": message.seq_id})
    return Operation(stream, seq, ForwardBackward(message.forward_only, message.loss_fn), body)


def optim_step(body: Body) -> Operation:
    """SDK OptimStepRequest."""
    return Operation(*_address(body), _content(OptimStep.KIND, lambda: _optim_step(body)))


def load_weights(body: Body, allowed: str | None) -> Operation:
    """SDK LoadWeightsRequest, in both forms. `allowed`: the path that the client may read, as the gateway says."""
    if body.get("model_id") is not None:
        stream, seq = _address(body)
    else:
        stream, seq = _new_model(body), identifiers.CREATION
    return Operation(stream, seq, _content(LoadWeights.KIND, lambda: _load_weights(body, allowed)))


def copy_weights(body: Body) -> tuple[schemas.CopyWeightsRequest, str]:
    """SDK CopyWeightsRequest, and the training run to make: no operation, so that what is wrong is refused at once."""
    run = _new_model(body)
    try:
        request = _validated(schemas.CopyWeightsRequest, body)
    except _ContentError as error:
        raise Undecodable(str(error)) from None
    refusal = refuse_ttl(request.ttl_seconds)
    if request.weights_access_token is not None:
        refusal = "weights_access_token: not served by this version"
    if refusal is not None:
        raise Undecodable(refusal)
    return request, run


def save_weights(body: Body) -> Operation:
    """SDK SaveWeightsRequest."""
    return Operation(*_address(body), _content(SaveWeights.KIND, lambda: _save_weights(body)))


def save_weights_for_sampler(body: Body) -> Operation:
    """SDK SaveWeightsForSamplerRequest."""
    return Operation(*_address(body), _content(SaveWeightsForSampler.KIND, lambda: _save_weights_for_sampler(body)))


def save_weights_external(body: Body) -> Operation:
    """SDK SaveWeightsExternalRequest."""
    return Operation(*_address(body), _content(SaveWeightsExternal.KIND, lambda: _save_weights_external(body)))


def sample(body: Body, weights: str | None, *, stand_ins: bool = False) -> Operation:
    """`weights`: `base`, a tinker path, or None for a sampling session whose weights this pod saved.

    With `stand_ins`, what is to be recorded for a loss that has a stand-in need not be: the stand-in asks for nothing.
    """
    stream, seq = _text(body, "sampling_session_id", _SAMPLER), _number(body, "seq_id", 0)
    try:
        return Operation(stream, seq, *_sample(body, weights, stand_ins))
    except _ContentError as error:
        return Operation(stream, seq, _refused(Sample.KIND, error))


def sample_sequence_ids(operation: Operation) -> list[str]:
    """One id per requested continuation, fixed when the request is submitted."""
    count = operation.args.num_samples if isinstance(operation.args, Sample) else 0
    return [f"{operation.request_id}:{index}" for index in range(count)]


def _content(kind: str, build: Callable[[], Arguments]) -> Arguments:
    try:
        return build()
    except _ContentError as error:
        return _refused(kind, error)


def _refused(kind: str, error: _ContentError) -> Refused:
    return Refused(kind, _shortened(str(error)))


def _create_model(body: Body) -> Arguments:
    request = _validated(schemas.CreateModelRequest, body)
    lora = request.lora_config
    if lora is None:
        raise _ContentError("lora_config: required, only LoRA adapters are trained")
    _refuse_other_optimizers(request.optimizer_config.type)
    if lora.seed is not None and not -LARGEST <= lora.seed <= LARGEST:
        raise _ContentError("lora_config.seed: must fit 64 bits")
    return CreateModel(
        base_model=request.base_model,
        rank=lora.rank,
        seed=lora.seed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        train_unembed=lora.train_unembed,
        user_metadata=request.user_metadata,
    )


def _optim_step(body: Body) -> Arguments:
    params = _validated(schemas.OptimStepRequest, body).optim_params
    if not isinstance(params, schemas.AdamParams):
        raise _ContentError(f"optimizer_params.type: {params.type!r} is not served, only Adam parameters")
    if params.learning_rate > MAX_LEARNING_RATE:
        raise _ContentError(
            f"adam_params.learning_rate: must be at most {MAX_LEARNING_RATE:g}, got {params.learning_rate}"
        )
    if params.learning_rate * params.weight_decay > 1:
        raise _ContentError(
            "adam_params.weight_decay: times learning_rate it must be at most 1, where a step leaves no weight,"
            f" got {params.weight_decay} and {params.learning_rate}"
        )
    return OptimStep(
        learning_rate=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        grad_clip_norm=params.grad_clip_norm,
    )


def _load_weights(body: Body, allowed: str | None) -> Arguments:
    request = _validated(schemas.LoadWeightsRequest, body)
    if request.path != allowed:
        raise _ContentError(f"path: {request.path[:LONGEST_PATH]!r} is no checkpoint that this API key may load")
    if request.optimizer_config is not None:
        _refuse_other_optimizers(request.optimizer_config.type)
    if request.weights_access_token is not None:
        raise _ContentError("weights_access_token: not served by this version")
    return LoadWeights(
        path=request.path,
        optimizer=request.optimizer,
        base_model=request.base_model,
        user_metadata=request.user_metadata,
    )


def _refuse_other_optimizers(kind: str) -> None:
    if kind != "adamw":
        raise _ContentError(f"optimizer_config.type: {kind!r} is not served, only 'adamw'")


def _save_weights(body: Body) -> Arguments:
    request = _validated(schemas.SaveWeightsRequest, body)
    return SaveWeights(
        name=request.path,
        ttl_seconds=request.ttl_seconds,
        overwrite=request.overwrite,
        user_metadata=_metadata(request.user_metadata),
    )


def _save_weights_for_sampler(body: Body) -> Arguments:
    request = _validated(schemas.SaveWeightsForSamplerRequest, body)
    if (request.path is None) == (request.sampling_session_seq_id is None):
        raise _ContentError("path: exactly one of path and sampling_session_seq_id is needed")
    return SaveWeightsForSampler(
        name=request.path,
        sampling_session_seq_id=request.sampling_session_seq_id,
        kind=request.kind,
        ttl_seconds=request.ttl_seconds,
        user_metadata=_metadata(request.user_metadata),
    )


def _save_weights_external(body: Body) -> Arguments:
    request = _validated(schemas.SaveWeightsExternalRequest, body)
    return SaveWeightsExternal(request.path, request.ttl_seconds, _recipients(request.age_encryption_recipients))


def _recipients(keys: list[str] | None) -> tuple[str, ...]:
    """An empty list is refused rather than taken for none: who sends one counts on encryption."""
    field = "age_encryption_recipients"
    if keys is not None and not 1 <= len(keys) <= sealing.MOST_RECIPIENTS:
        raise _ContentError(f"{field}: must be 1 to {sealing.MOST_RECIPIENTS} public keys, got {len(keys)}")
    for index, key in enumerate(keys or ()):
        try:
            sealing.recipient(key)
        except sealing.BadRecipient as error:
            raise _ContentError(f"{field}[{index}]: neither a key of age (age1...) nor of SSH: {error}") from None
    return tuple(keys or ())


def _sample(body: Body, weights: str | None, stand_ins: bool) -> tuple[Sample, bytes]:
    """The arguments, and the body of the operation."""
    request = _validated(schemas.SampleRequest, body)
    params = request.sampling_params
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise _ContentError(f"num_samples: must be between 1 and {MAX_SAMPLES}, got {request.num_samples}")
    if request.record_stability_info and not stand_ins:
        raise _ContentError("record_stability_info: what stable_reinforce needs is not published, so it isn't served")
    prompt, chunks = _prompt(request.prompt.chunks)
    if len(prompt) > MOST_PROMPT_TOKENS:
        raise _ContentError(f"prompt: {len(prompt)} tokens, more than the {MOST_PROMPT_TOKENS} of any context window")
    stop = tuple(params.stop) if isinstance(params.stop, list) else params.stop
    args = Sample(
        prompt=prompt,
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=stop,  # type: ignore[arg-type]  # a list is of one type throughout, which tuple() forgets
        seed=params.seed,
        weights=_weights(weights),
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=_targets(request.target_prompt_logprobs),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        prompt_in_body=bool(chunks),
    )
    return args, chunks


def _prompt(chunks: Sequence[schemas.Chunk]) -> tuple[tuple[int, ...], bytes]:
    """A prompt as token ids or, if there are images in it, as a serialised Datum; the other is empty."""
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, schemas.OtherChunk):
            why = " (nothing is fetched for a client)" if chunk.type == _ASSET else ""
            raise _ContentError(
                f"prompt.chunks[{index}]: chunks of type {chunk.type!r} are not served{why}, only encoded_text and"
                " image"
            )
    texts = [chunk for chunk in chunks if isinstance(chunk, schemas.EncodedTextChunk)]
    if len(texts) == len(chunks):
        return tuple(token for chunk in texts for token in chunk.tokens), b""
    datum = tinker_public.Datum()
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, schemas.ImageChunk):
            datum.model_input.add().image.MergeFrom(
                tinker_public.ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=chunk.expected_tokens)
            )
        elif isinstance(chunk, schemas.EncodedTextChunk):
            try:
                tokens = array.array("i", chunk.tokens)
            except OverflowError:
                raise _ContentError(f"prompt.chunks[{index}].tokens: must be ids of 32 bits") from None
            datum.model_input.add().encoded_text.tokens = tokens.tobytes()
    return (), datum.SerializeToString()


def _targets(tensor: schemas.TargetTokens | None) -> PromptTargets | None:
    if tensor is None:
        return None
    crow, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if (crow is None) != (columns is None):
        raise _ContentError("target_prompt_logprobs: has one of sparse_crow_indices and sparse_col_indices")
    return PromptTargets(
        rows=tensor.shape[0],
        width=tensor.shape[1],
        ids=tuple(tensor.data),
        crow=None if crow is None else tuple(crow),
        columns=None if columns is None else tuple(columns),
    )


def _weights(word: str | None) -> str | None:
    if word is None:
        return WEIGHTS_OF_SAMPLER
    return None if word == "base" else word


def _metadata(value: dict[str, str] | None) -> dict[str, Any] | None:
    return None if value is None else dict(value)


def _validated(model: type[_Request], body: Body) -> _Request:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _ContentError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """The first field that is wrong, and why."""
    first = error.errors(include_url=False, include_context=False)[0]
    # What is not finite is null in the SDK's JSON.
    no_number = first["type"] == "float_type" and first["input"] is None
    return _shortened(f"{_location(first['loc'])}: {'must be a finite number' if no_number else first['msg']}")


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."


def _location(parts: tuple[int | str, ...]) -> str:
    """`("prompt", "chunks", 1)` as `prompt.chunks[1]`, without the names of alternatives, which no body has."""
    text = ""
    for part in parts:
        if part in schemas.ALTERNATIVES:
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "body"


def _new_model(body: Body) -> str:
    number = _number(body, "model_seq_id", 0, MOST_OF_A_SESSION - 1)
    return identifiers.model_id(_text(body, "session_id", _SESSION), number)


def _address(body: Body) -> tuple[str, int]:
    return _text(body, "model_id", _MODEL), _number(body, "seq_id", 1)


def _text(body: Body, field: str, pattern: re.Pattern[str]) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise Undecodable(f"{field}: required, must match {pattern.pattern}")
    return value


def _number(body: Body, field: str, least: int, most: int = LARGEST) -> int:
    value = body.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Undecodable(f"{field}: required, must be an integer from {least} to {most}")
    return value
