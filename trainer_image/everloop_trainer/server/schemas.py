"""Request bodies of the tinker SDK's JSON endpoints, as far as the session pod serves them.

Field names and defaults equal those of the SDK's own types, which can't be imported here (`import tinker` tries torch);
a test compares them. Unknown fields are tolerated: a newer SDK may send more. Sources: `tinker/types/*_request.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class LoraConfig(_Request):
    """SDK `LoraConfig`."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(_Request):
    """SDK `OptimizerConfig`: the optimizer family, fixed when a model is created."""

    type: str = "adamw"


class CreateModelRequest(_Request):
    """SDK `CreateModelRequest`."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
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


ADAM, OTHER = OPTIMIZER_FAMILIES = ("(adam)", "(other)")
"""Tags that stand in the locations of errors, spelled as no field is."""


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
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class SaveWeightsRequest(_Request):
    """SDK `SaveWeightsRequest`."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(_Request):
    """SDK `SaveWeightsForSamplerRequest`."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(_Request):
    """SDK `SaveWeightsExternalRequest`."""

    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class EncodedTextChunk(_Request):
    """SDK `EncodedTextChunk`."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class OtherChunk(_Request):
    """An image, an image's address or audio: decoded so that the refusal can name it."""

    type: str


def _chunk_type(value: object) -> str:
    kind = value.get("type", "encoded_text") if isinstance(value, dict) else getattr(value, "type", "")
    return "encoded_text" if kind == "encoded_text" else "other"


Chunk = Annotated[
    Annotated[EncodedTextChunk, Tag("encoded_text")] | Annotated[OtherChunk, Tag("other")], Discriminator(_chunk_type)
]


class ModelInput(_Request):
    """SDK `ModelInput`."""

    chunks: list[Chunk]


class SamplingParams(_Request):
    """SDK `SamplingParams`."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
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
    base_model: str | None = None
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
