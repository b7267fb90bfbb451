"""The trainer's own report (`GET /status` of the session pod), read tolerantly: a newer trainer may say more."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

Short = Annotated[str, StringConstraints(max_length=253)]
Long = Annotated[str, StringConstraints(max_length=4096)]


def _rfc3339(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without a zone")
    return text


Stamp = Annotated[str, StringConstraints(max_length=40), AfterValidator(_rfc3339)]
MaybeStamp = Annotated[Stamp | None, BeforeValidator(lambda value: value or None)]
"""The trainer says '' for what has not happened yet."""


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore", frozen=True)


class Incarnation(_Part):
    """Which incarnation of the session's storage the server is."""

    number: int
    attempt: int
    boot: int
    pod_uid: Short = Field(alias="podUID")


class BaseModelReport(_Part):
    """The base model; the hash is empty until an engine has loaded it."""

    name: Short
    revision: Short = ""
    manifest_sha256: Annotated[str, StringConstraints(max_length=64)] = Field(default="", alias="manifestSHA256")


class CheckpointReport(_Part):
    """A model's newest checkpoint."""

    name: Short
    step: int = 0
    time: MaybeStamp = None
    path: Long = ""
    bytes: int = 0


class EngineReport(_Part):
    """The engine; it has the base model loaded once it has a pid."""

    pid: int | None = None


class ModelReport(_Part):
    """One model (LoRA adapter)."""

    id: Short
    rank: int = 0
    step: int = 0
    latest_checkpoint: CheckpointReport | None = None


class StorageReport(_Part):
    """The storage; `error` is empty while all is well."""

    error: Long = ""


class RecoveryReport(_Part):
    """One recovery that the server went through."""

    id: Annotated[str, StringConstraints(max_length=64)]
    reason: Annotated[str, StringConstraints(max_length=64)]
    resumed_from: Long = ""
    replayed_operations: int = 0
    lost_operations: int = 0
    seconds: Annotated[str, StringConstraints(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?$")] | None = None
    time: Stamp


class SnapshotRequest(_Part):
    """The latest request to write snapshots ahead of a move."""

    id: Short = ""
    """Its name."""
    pending: int = 0
    """Models whose snapshot is still being written."""


class CopiesReport(_Part):
    """The copies outside the storage."""

    pending: int = 0
    """States that have none yet."""
    last_time: MaybeStamp = None
    error: Long = ""
    """What is in the way; empty while all is well."""


class AutomaticCheckpoints(_Part):
    """How automatic checkpoints are taken now."""

    every_seconds: float
    keep_last: int


class UnderwayReport(_Part):
    """An operation that runs, or that was tried and has no result."""

    operation: Short
    seconds: Annotated[int, Field(ge=0)] | None = None
    """Since an engine began it; None if none has since the server started."""
    deaths: int = 0
    """How much the engines count that died in it."""


MOST = 2**53
"""A larger number is no count, and no floating-point number is exact there."""
Seconds = Annotated[str, StringConstraints(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?$")]


MOST_TOKEN_COUNTS = 260
"""Of 64 models with their keys and all others together, four kinds each."""


class EndedOperations(_Part):
    """How many operations of one kind have ended in one way since the server started."""

    kind: Annotated[str, StringConstraints(max_length=64)]
    outcome: Literal["succeeded", "failed"]
    count: int = Field(ge=0, le=MOST)


class StepSeconds(_Part):
    """Where the time of operations of models went, in seconds since the server started."""

    wait: Seconds = "0"
    forward: Seconds = "0"
    backward: Seconds = "0"
    optimizer: Seconds = "0"
    journal: Seconds = "0"


class Tokens(_Part):
    """Tokens of one kind, of one model and with one key, since the server started."""

    model: Annotated[str, StringConstraints(pattern=r"^(m-[0-9a-f]{12}|base|other)$")]
    key: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{12}|unknown|other)$")]
    kind: Literal["trained", "scored", "prompt", "sampled"]
    count: int = Field(ge=0, le=MOST)


class WorkReport(_Part):
    """What the server has had computed since it started."""

    operations: Annotated[list[EndedOperations], Field(max_length=64)] = []
    useful_seconds: Seconds = "0"
    """In operations that were computed for the first time and succeeded."""
    replay_seconds: Seconds = "0"
    """In bringing models back into an engine."""
    step_seconds: StepSeconds | None = None
    """None from an older trainer."""
    tokens: Annotated[list[Tokens], Field(max_length=MOST_TOKEN_COUNTS)] = []


class FetchingReport(_Part):
    """How far the base model has come into the cache."""

    percent: int = Field(ge=0, le=100)
    total_bytes: int = Field(ge=0, le=MOST)


class TrainerReport(_Part):
    """The whole report."""

    state: Annotated[str, StringConstraints(max_length=32)]
    """Starting, Recovering or Serving; Fetching as long as it is the init container that answers."""
    incarnation: Incarnation | None = None
    lineage: Short = ""
    """Identifier of what the storage holds; empty until it is open."""
    base_model: BaseModelReport | None = None
    engine: EngineReport = EngineReport()
    models: list[ModelReport] = []
    last_snapshot_time: MaybeStamp = None
    storage: StorageReport = StorageReport()
    replay_mismatches: int = 0
    """Replayed operations whose result differed from the recorded one."""
    waiting_operations: int | None = Field(default=None, ge=0, le=MOST)
    """Accepted and without a result; None of an older trainer."""
    recoveries: list[RecoveryReport] = []
    idle_seconds: int = Field(default=0, ge=0)
    """Since the last call of any client and the last operation; 0 while one runs, and from an older trainer."""
    work: WorkReport = WorkReport()
    """Of an older trainer nothing."""
    copies: CopiesReport | None = None
    """None where none are made."""
    checkpoints: AutomaticCheckpoints | None = None
    """None from an older trainer, which takes them as its pod was made."""
    fetching: FetchingReport | None = None
    """None from any other container, and until it is known how much there is to come."""
    underway: UnderwayReport | None = None
    snapshot_request: SnapshotRequest | None = None
    """None until one was made of this incarnation."""

    @property
    def serving(self) -> bool:
        """Whether the engine is up and every model is restored."""
        return self.state == "Serving"
