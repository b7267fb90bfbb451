"""What the operator tells the session pod: `EVERLOOP_CONFIG` and a few variables of the downward API, read strictly."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

PORT = 8080
GRACE_SECONDS = 30.0
"""How long Kubernetes lets a pod end that does not say how long it needs."""
NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

Name = Annotated[str, Field(pattern=NAME, max_length=63)]
NonEmpty = Annotated[str, Field(min_length=1)]
AbsolutePath = Annotated[str, Field(pattern=r"^/")]


class ConfigError(Exception):
    """The configuration is unusable; the message names each field and never its value."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Json(_Strict):
    model_config = ConfigDict(alias_generator=to_camel)


class BaseModelConfig(_Json):
    """The base model: a directory of safetensors files with a transformers `config.json`."""

    name: NonEmpty
    revision: str = ""
    path: AbsolutePath
    aliases: tuple[str, ...] = ()
    """Further names by which clients may ask for it."""


class ImagesConfig(_Json):
    """What one image may have: bytes as it is sent, and pixels once it is decoded."""

    max_bytes: Annotated[int, Field(ge=1)] = 8 << 20
    max_pixels: Annotated[int, Field(ge=1)] = 1 << 24


class EngineConfig(_Json):
    """How the engine computes; results depend on every one of these."""

    dtype: Literal["Float32", "BFloat16"] = "Float32"
    max_sequence_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens."""
    threads: Annotated[int, Field(ge=1)] = 1
    images: ImagesConfig = ImagesConfig()
    deterministic: Literal[True] = True
    """Engines know no other way to compute."""


class AdaptersConfig(_Json):
    """How many models the session takes, and their greatest LoRA rank."""

    max_models: Annotated[int, Field(ge=1)] = 16
    max_rank: Annotated[int, Field(ge=1)] = 128


class StorageConfig(_Json):
    """`root` is the directory of this TrainingSession on the volume that outlives the node."""

    root: AbsolutePath


class SnapshotsConfig(_Json):
    """Seconds of engine time after which a model is snapshotted: what a recovery replays at most."""

    replay_budget_seconds: Annotated[float, Field(ge=0)] = 20.0


class CheckpointsConfig(_Json):
    """Automatic checkpoints of each model: seconds between two (0 for none), and how many are kept."""

    every_seconds: Annotated[float, Field(ge=0)] = 0.0
    keep_last: Annotated[int, Field(ge=1)] = 2


class Settings(_Json):
    """What a running pod may be told to change: the body of `PUT /settings`, which is also what the pod keeps of it."""

    checkpoints: CheckpointsConfig


class S3Config(_Json):
    """Where copies go: `uri` is `s3://bucket/prefix`. Empty strings leave it to boto3.

    `credentials_dir` is a mounted Secret with the files AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN.
    """

    uri: Annotated[str, Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$")]
    region: str = ""
    endpoint_url: str = ""
    kms_key_id: str = ""
    credentials_dir: str = ""


class CopiesConfig(_Json):
    """Copies of checkpoints and snapshots; seconds between the copies of two snapshots of a model."""

    s3: S3Config
    snapshot_seconds: Annotated[float, Field(ge=0)] = 60.0


class SessionConfig(_Json):
    """The JSON of `EVERLOOP_CONFIG`."""

    format: Literal[1]
    namespace: Name
    name: Name
    uid: NonEmpty
    attempt: Annotated[int, Field(ge=1)]
    base_model: BaseModelConfig
    engine: EngineConfig = EngineConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    storage: StorageConfig
    snapshots: SnapshotsConfig = SnapshotsConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    copies: CopiesConfig | None = None
    token_file: AbsolutePath = "/run/secrets/everloop/token"  # noqa: S105 - where it lies, not what it is


class HuggingFaceConfig(_Json):
    """A model on the Hugging Face hub; the file with the token is empty for public ones."""

    repo: NonEmpty
    revision: NonEmpty = "main"
    token_file: str = ""


class FetchConfig(_Json):
    """The JSON of `EVERLOOP_FETCH`: what the init container puts into `directory`, from one of two sources."""

    format: Literal[1]
    directory: AbsolutePath
    hugging_face: HuggingFaceConfig | None = None
    s3: S3Config | None = None


class TrainerConfig(_Strict):
    """Everything that the processes of a session pod are told from outside."""

    session: SessionConfig
    pod_ip: NonEmpty
    pod_uid: NonEmpty
    pod_name: str
    node_name: str
    run_dir: AbsolutePath
    """Directory of sockets, private to the pod."""
    grace_seconds: float = GRACE_SECONDS
    """Seconds from the signal to end until the pod is killed."""
    compact_after_records: int | None = None
    """How many records of the journal make a compaction due; by default as many as the store says."""

    @property
    def spare_socket(self) -> Path:
        """Where the spare listens for the server."""
        return Path(self.run_dir) / "spare.sock"


def read_config(environment: Mapping[str, str] = os.environ) -> TrainerConfig:
    """Reads the environment.

    Raises:
        ConfigError: a variable is missing, or a field of `EVERLOOP_CONFIG` is missing, unknown or out of range.
    """
    values: dict[str, Any] = {
        "pod_ip": _required(environment, "POD_IP"),
        "pod_uid": _required(environment, "POD_UID"),
        "pod_name": environment.get("POD_NAME", ""),
        "node_name": environment.get("NODE_NAME", ""),
        "run_dir": environment.get("EVERLOOP_RUN_DIR", "/run/everloop"),
    }
    text = _required(environment, "EVERLOOP_CONFIG")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"EVERLOOP_CONFIG: not JSON: {error.msg} at position {error.pos}") from None
    for variable, field in (
        ("EVERLOOP_COMPACT_AFTER_RECORDS", "compact_after_records"),
        ("EVERLOOP_GRACE_SECONDS", "grace_seconds"),
    ):
        number = environment.get(variable)
        if number is not None:
            if not (number.isascii() and number.isdecimal() and int(number)):
                raise ConfigError(f"{variable}: not a whole number from 1 on")
            values[field] = int(number)
    try:
        return TrainerConfig(session=SessionConfig.model_validate_json(text), **values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or '(top)'}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"{error.title}: {'; '.join(problems)}") from None


def _required(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ConfigError(f"{name}: required environment variable is not set")
    return value
