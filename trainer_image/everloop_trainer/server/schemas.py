"""Request bodies of the tinker SDK's JSON endpoints, as far as the session pod serves them.

Field names and defaults equal those of the SDK's own types, which can't be imported here (`import tinker` tries torch);
a test compares them. Unknown fields are tolerated: a newer SDK may send more. Values are not converted: a text that
looks like a number is none, and neither is a truth value. Sources: `tinker/types/*_request.py`.
"""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
)
from pydantic_core import PydanticCustomError

from everloop_http.json_bodies import MOST_OF_A_SESSION


def _storable(value: Any) -> Any:
    """What can be read back from a record of the journal."""
    try:
        pydantic_core.from_json(json.dumps({"a": {"user_metadata": value}}, allow_nan=False))
    except (ValueError, RecursionError):
        raise PydanticCustomError(
            "storable", "must hold Unicode text and finite numbers only, and must not nest deeply"
        ) from None
    return value


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "must be Unicode text, without halves of surrogate pairs") from None
    return value


Text = Annotated[str, Field(max_length=4096), AfterValidator(_text)]
Metadata = Annotated[dict[str, Any], AfterValidator(_storable)]
TextMetadata = Annotated[dict[str, str], AfterValidator(_storable)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
OfSession = Annotated[int, Field(ge=0, lt=MOST_OF_A_SESSION)]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), strict=True)


class LoraConfig(_Request):
    """SDK `LoraConfig`."""

    rank: int
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(_Request):
    """SDK `OptimizerConfig`: the optimizer family, fixed when a model is created."""

    type: str = "adamw"


class CreateModelRequest(_Request):
    """SDK `CreateModelRequest`."""

    session_id: str
    model_seq_id: OfSession
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(_Request):
    """SDK `GetInfoRequest`."""

    model_id: str
    type: Literal["get_info"] = "get_info"


class WeightsInfoRequest(_Request):
    """What the SDK's `RestClient.get_weights_info_by_tinker_path` sends."""

    tinker_path: str


class AdamParams(_Request):
    """SDK `AdamParams`: AdamW as in torch, weight decay decoupled, `grad_clip_norm` 0 is off."""

    learning_rate: FiniteFloat = 0.0001
    beta1: FiniteFloat = 0.9
    beta2: FiniteFloat = 0.95
    eps: FiniteFloat = 1e-12
    weight_decay: FiniteFloat = 0.0
    grad_clip_norm: FiniteFloat = 0.0


class OtherOptimParams(_Request):
    """Parameters of an optimizer family other than Adam, told apart by `type`."""

    type: str


ADAM, OTHER, TEXT_CHUNK, IMAGE_CHUNK, OTHER_CHUNK, STOP_TEXT, STOP_TEXTS, STOP_IDS = ALTERNATIVES = (
    "(adam)",
    "(other)",
    "(text chunk)",
    "(image chunk)",
    "(other chunk)",
    "(stop text)",
    "(stop texts)",
    "(stop ids)",
)
"""Tags of what a field may be, which stand in the locations of errors: spelled as no field is."""


def _optimizer_family(value: object) -> str:
    typed = "type" in value if isinstance(value, dict) else isinstance(value, OtherOptimParams)
    return OTHER if typed else ADAM


OptimParams = Annotated[
    Annotated[AdamParams, Tag(ADAM)] | Annotated[OtherOptimParams, Tag(OTHER)], Discriminator(_optimizer_family)
]


class OptimStepRequest(_Request):
    """SDK `OptimStepRequest`; on the wire the parameters are `adam_params` or `optimizer_params`."""

    optim_params: OptimParams = Field(validation_alias=AliasChoices("optim_params", "adam_params", "optimizer_params"))
    model_id: str
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"


class LoadWeightsRequest(_Request):
    """SDK `LoadWeightsRequest`: into a model (`model_id`, `seq_id`), or into a new one (`session_id`, ...)."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: OfSession | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    path: Text
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class CopyWeightsRequest(_Request):
    """SDK `CopyWeightsRequest` with the training run that is to hold the copy: projects are the gateway's."""

    source_path: Text
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class SaveWeightsRequest(_Request):
    """SDK `SaveWeightsRequest`."""

    model_id: str
    path: Text | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: TextMetadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(_Request):
    """SDK `SaveWeightsForSamplerRequest`."""

    model_id: str
    path: Text | None = None
    sampling_session_seq_id: OfSession | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: TextMetadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(_Request):
    """SDK `SaveWeightsExternalRequest`."""

    model_id: str
    path: Text
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class EncodedTextChunk(_Request):
    """SDK `EncodedTextChunk`."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


def _decoded(value: object) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]  # what else there is raises TypeError
    except (TypeError, ValueError):
        raise PydanticCustomError("base64", "must be text in base64") from None


class ImageChunk(_Request):
    """SDK `ImageChunk`; `data` is the file, in base64 on the wire. `expected_tokens` is an int32 of the engine's."""

    data: Annotated[bytes, BeforeValidator(_decoded)]
    format: str
    expected_tokens: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    type: Literal["image"] = "image"


class OtherChunk(_Request):
    """An image's address or audio: decoded so that the refusal can name it."""

    type: str


def _chunk_type(value: object) -> str:
    kind = value.get("type", "encoded_text") if isinstance(value, dict) else getattr(value, "type", "")
    return {"encoded_text": TEXT_CHUNK, "image": IMAGE_CHUNK}.get(str(kind), OTHER_CHUNK)


Chunk = Annotated[
    Annotated[EncodedTextChunk, Tag(TEXT_CHUNK)]
    | Annotated[ImageChunk, Tag(IMAGE_CHUNK)]
    | Annotated[OtherChunk, Tag(OTHER_CHUNK)],
    Discriminator(_chunk_type),
]


class ModelInput(_Request):
    """SDK `ModelInput`."""

    chunks: list[Chunk]


def _stop_type(value: object) -> str:
    if isinstance(value, str):
        return STOP_TEXT
    return STOP_TEXTS if isinstance(value, list) and value and isinstance(value[0], str) else STOP_IDS


Stop = Annotated[
    Annotated[Text, Tag(STOP_TEXT)] | Annotated[list[Text], Tag(STOP_TEXTS)] | Annotated[list[int], Tag(STOP_IDS)],
    Discriminator(_stop_type),
]


class SamplingParams(_Request):
    """SDK `SamplingParams`."""

    max_tokens: int | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    temperature: FiniteFloat = 1
    top_k: int = -1
    top_p: FiniteFloat = 1


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class TargetTokens(_Request):
    """SDK `TensorData`, of token ids: int64, two-dimensional, dense or in compressed sparse rows."""

    data: list[Int64]
    dtype: Literal["int64"]
    shape: Annotated[list[Int64], Field(min_length=2, max_length=2)]
    sparse_crow_indices: list[Int64] | None = None
    sparse_col_indices: list[Int64] | None = None


class SampleRequest(_Request):
    """SDK `SampleRequest`."""

    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: Text | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TargetTokens | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class FutureRetrieveRequest(_Request):
    """SDK `FutureRetrieveRequest`."""

    request_id: str
    allow_metadata_only: bool = False


class SamplingSessionFuturesTarget(_Request):
    """SDK `SamplingSessionFuturesTarget`: one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Annotated[int, Field(ge=0, lt=2**32)] = 0


class FuturesRetrieveRequest(_Request):
    """SDK `FuturesRetrieveRequest`."""

    target: SamplingSessionFuturesTarget
    prev_cursor: Annotated[int, Field(ge=0)] = 0
    timeout: Annotated[FiniteFloat, Field(ge=0)] | None = None
    retrieved_request_ids: list[str] = []


class FutureCancelRequest(_Request):
    """What the SDK's client sends when a sample is abandoned (`InternalClientHolder._send_cancel_request`)."""

    request_id: str
