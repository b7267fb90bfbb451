"""Operations of the wire as values, and their form in the journal.

An operation is addressed by its stream (model id or sampling session id) and its number there. Small arguments are
journaled as JSON and validated strictly when read back; a forward_backward's protobuf request is the record's body, and
so is a prompt with images.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from everloop_trainer.session.identifiers import CREATION, is_model, is_sampler, request_id

STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
WEIGHTS_OF_SAMPLER = "sampler"
"""`Sample.weights` as submitted to a sampling session that a save_weights_for_sampler of this session made."""
FROZEN = "frozen:"
"""Prefix of `Sample.weights` once resolved: `frozen:<storage id>/<op-key>` names one stored file for ever."""


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class CreateModel:
    """SDK `create_model`: a new LoRA adapter. `seed` None is resolved at acceptance."""

    KIND: ClassVar[str] = "create_model"
    base_model: str
    rank: int
    seed: int | None
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
    user_metadata: dict[str, Any] | None = None


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """SDK `forward_backward` and `forward`; the operation's body is a protobuf ForwardBackwardRequest."""

    KIND: ClassVar[str] = "forward_backward"
    forward_only: bool
    loss_fn: str


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class OptimStep:
    """SDK `optim_step` with Adam parameters; a `grad_clip_norm` of 0 switches clipping off."""

    KIND: ClassVar[str] = "optim_step"
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class LoadWeights:
    """SDK `load_weights`: a checkpoint into an existing model or, as number 0, into a new one that it creates.

    With `optimizer` its moments and step count are loaded too, else they start anew; gradients never come with it.
    `source` is the `frozen:` name of another model's checkpoint, settled at acceptance; None if there was none then.
    `base_model` is what the client asked for, None where it left it open.
    """

    KIND: ClassVar[str] = "load_weights"
    path: str
    optimizer: bool
    source: str | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SaveWeights:
    """SDK `save_weights` (`save_state`): a named training checkpoint with optimizer state. `ttl_seconds` in seconds."""

    KIND: ClassVar[str] = "save_weights"
    name: str | None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SaveWeightsForSampler:
    """SDK `save_weights_for_sampler`: weights under a name, or frozen for a new sampling session."""

    KIND: ClassVar[str] = "save_weights_for_sampler"
    name: str | None
    sampling_session_seq_id: int | None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SaveWeightsExternal:
    """SDK `save_weights_external`: weights as files to be downloaded.

    With `recipients`, keys of age (age-encryption.org), each file is encrypted so that only their holders can read it.
    """

    KIND: ClassVar[str] = "save_weights_external"
    name: str
    ttl_seconds: int | None = None
    recipients: tuple[str, ...] = ()
    user_metadata: ClassVar[None] = None


Save = SaveWeights | SaveWeightsForSampler | SaveWeightsExternal


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class PromptTargets:
    """A matrix of token ids of so many rows and columns; -1 asks for nothing. Row i is about the prompt's token i + 1.

    `ids` are its cells, row by row: all of them or, with `crow` and `columns`, those of compressed sparse rows.
    """

    rows: int
    width: int
    ids: tuple[int, ...]
    crow: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Sample:
    """SDK `asample`: `num_samples` continuations of a prompt of token ids.

    `weights`: None for the base model, a tinker path, or `WEIGHTS_OF_SAMPLER`; acceptance resolves the latter two to
    a frozen file, and `seed` None to a number. `stop`: None stops at EOS, an empty list at nothing. Then come six that
    say what is told beside the sampled tokens and their log-probabilities. `prompt_in_body`: the prompt has images, so
    it is the operation's body, the chunks of a protobuf Datum as the client gave them, and `prompt` is empty.
    """

    KIND: ClassVar[str] = "sample"
    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    stop: str | tuple[str, ...] | tuple[int, ...] | None
    seed: int | None
    weights: str | None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: PromptTargets | None = None
    prompt_alt_tokens_k: int = 0
    prompt_in_body: bool = False


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Refused:
    """A numbered request whose content cannot be served. It takes its turn and ends as a user error.

    `operation` is the kind that was asked for: a refused forward_backward or optim_step counts in the accumulation
    window as a failed one. `forward_only` as in ForwardBackward.
    """

    KIND: ClassVar[str] = "refused"
    operation: str
    error: str
    forward_only: bool = False


Arguments = (
    CreateModel
    | ForwardBackward
    | OptimStep
    | LoadWeights
    | SaveWeights
    | SaveWeightsForSampler
    | SaveWeightsExternal
    | Sample
    | Refused
)

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind.KIND: TypeAdapter(kind)
    for kind in (
        CreateModel,
        ForwardBackward,
        OptimStep,
        LoadWeights,
        SaveWeights,
        SaveWeightsForSampler,
        SaveWeightsExternal,
        Sample,
        Refused,
    )
}


def asked_kind(args: Arguments) -> str:
    """The kind that was asked for, of what is refused as well."""
    return args.operation if isinstance(args, Refused) else args.KIND


def arguments_to_json(args: Arguments) -> dict[str, Any]:
    """The arguments as plain values for the journal, which JSON can hold; as JSON values, NaN would become null.

    Without those that have their defaults: what an older version does not know it need not read where it isn't used.
    """
    dumped: dict[str, Any] = _ADAPTERS[args.KIND].dump_python(args, exclude_defaults=True)
    return dumped


def arguments_from_json(kind: str, values: object) -> Arguments:
    """The arguments that `arguments_to_json` wrote.

    Raises:
        ValueError: names the kind, or the field that is missing, unknown or of the wrong type.
    """
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        raise ValueError(f"k: {kind!r} is no kind of operation")
    try:
        args: Arguments = adapter.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"a.{field} of {kind}: {first['msg']}") from error
    return args


@dataclass(frozen=True, slots=True)
class Operation:
    """One numbered operation as it was submitted. `body` holds raw request bytes where they are large.

    Raises:
        ValueError: the stream or number is none that this kind of operation can have.
    """

    stream: str
    seq: int
    args: Arguments
    body: bytes = b""

    def __post_init__(self) -> None:
        if not (is_model(self.stream) or is_sampler(self.stream)):
            raise ValueError(f"stream: {self.stream!r} is neither a model nor a sampling session")
        if self.seq < 0:
            raise ValueError(f"seq: must not be negative, got {self.seq}")
        if isinstance(self.args, Refused):
            return
        if isinstance(self.args, Sample) != is_sampler(self.stream):
            raise ValueError(f"stream: a {self.args.KIND} does not belong to {self.stream!r}")
        if isinstance(self.args, LoadWeights):
            return
        if is_model(self.stream) and isinstance(self.args, CreateModel) != (self.seq == CREATION):
            raise ValueError(f"seq: {self.seq} is not a number that a {self.args.KIND} can have")

    @property
    def request_id(self) -> str:
        """The id that the client polls."""
        return request_id(self.stream, self.seq)
