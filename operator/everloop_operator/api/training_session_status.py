"""What the operator reports about a TrainingSession. Only the operator writes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .schema import ApiModel, Count, Decimal, Text, Time

MAX_MODELS = 20
MAX_RECOVERIES = 10
MAX_FAILURES = 100

Identifier = Annotated[str, Field(max_length=253)]


class Condition(ApiModel):
    """One aspect of the state, in the standard shape of Kubernetes."""

    type: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="Name of the aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, Field(min_length=1, max_length=128)] = Field(description="Why, in one word for programs.")
    message: Text = Field(default="", description="Why, in words for people.")
    last_transition_time: Time = Field(description="When `status` last changed.")
    observed_generation: Count | None = Field(default=None, description="Generation of the spec that this is about.")


class PodStatus(ApiModel):
    """The pod of the current attempt."""

    name: Identifier = Field(description="Name of the pod.")
    uid: Identifier = Field(default="", description="UID of the pod.")
    node: Identifier = Field(default="", description="Node that it runs on.")
    node_uid: Identifier = Field(default="", alias="nodeUID", description="UID of that node.")
    ip: Annotated[str, Field(max_length=64)] = Field(default="", description="Address of the pod.")


class BaseModelStatus(ApiModel):
    """The base model as it was loaded."""

    revision: Annotated[str, Field(max_length=128)] = Field(default="", description="Revision, as the spec names it.")
    manifest_sha256: Annotated[str, Field(max_length=64)] = Field(
        default="", alias="manifestSHA256", description="SHA-256 over names and hashes of the model's files."
    )


class StorageStatus(ApiModel):
    """The storage that the session recovers from."""

    fence_mode: Literal["", "SharedPosix", "Exclusive", "NodeLocal"] = Field(
        default="",
        description="How a replaced pod is kept from writing: SharedPosix (claim is ReadWriteMany, fenced by the "
        "journal), Exclusive (the volume is attached to one node at a time; recovery waits for it) or NodeLocal (only "
        "one node has the volume: what is on it is lost with that node).",
    )
    claim_uid: Identifier = Field(
        default="", alias="claimUID", description="UID of the journal's claim; empty while there is no such claim."
    )
    lineage: Identifier = Field(
        default="",
        description="Identifier of what this storage holds: the same again for a session that is created anew on it. "
        "Empty until a pod has opened the storage.",
    )
    last_snapshot_time: Time | None = Field(default=None, description="When the newest snapshot was completed.")
    pending_copies: Count = Field(default=0, description="Checkpoints and snapshots that have no copy in S3 yet.")
    last_copy_time: Time | None = Field(default=None, description="When the newest copy in S3 was completed.")
    error: Text = Field(default="", description="Why nothing can be written; empty while all is well.")
    replay_mismatches: Count = Field(
        default=0,
        description="Replayed operations whose result differed from the recorded one; anything but 0 means that the "
        "model is not bit-equal to one that was never interrupted.",
    )


class CheckpointStatus(ApiModel):
    """The newest checkpoint of a model."""

    name: Identifier = Field(description="Name that the client gave it.")
    step: Count = Field(default=0, description="Optimizer steps that it contains.")
    time: Time | None = Field(default=None, description="When it was completed.")


class ModelStatus(ApiModel):
    """One LoRA adapter."""

    id: Identifier = Field(description="Identifier of the model in storage.")
    rank: Count = Field(default=0, description="LoRA rank.")
    step: Count = Field(default=0, description="Optimizer steps applied.")
    latest_checkpoint: CheckpointStatus | None = Field(default=None, description="Its newest checkpoint.")


class LatestCheckpoint(ApiModel):
    """The newest checkpoint of the session."""

    model: Identifier = Field(description="Identifier of its model.")
    name: Identifier = Field(description="Name that the client gave it.")
    step: Count = Field(default=0, description="Optimizer steps that it contains.")
    location: Text = Field(default="", description="The tinker:// path by which clients load it.")
    time: Time | None = Field(default=None, description="When it was completed.")
    bytes: Count = Field(default=0, description="Its size.")


class BudgetStatus(ApiModel):
    """How much of a budget is used."""

    used: Count = Field(default=0, description="Replacements within the window.")
    limit: Count = Field(default=0, description="Replacements that the spec allows in the window.")
    failures: Annotated[list[Time], Field(max_length=MAX_FAILURES)] = Field(
        default=[], description="When they happened, oldest first."
    )


class BudgetsStatus(ApiModel):
    """How much of each budget is used."""

    infrastructure: BudgetStatus = Field(default=BudgetStatus(), description="Lost nodes, lost and failed pods.")
    application: BudgetStatus = Field(default=BudgetStatus(), description="What the session has done to itself.")


class FailureStatus(ApiModel):
    """The last container of the session that ended otherwise than well."""

    reason: Annotated[str, Field(max_length=64)] = Field(description="Its class, as docs/failures.md lists them.")
    message: Text = Field(default="", description="Exit code and last words.")
    remedy: Text = Field(default="", description="What a person can do about it.")
    exit_code: int | None = Field(default=None, ge=-1, description="Exit code of the container.")
    operation: Identifier = Field(default="", description="The operation that ran, as far as it is known.")
    pod_uid: Identifier = Field(default="", alias="podUID", description="UID of the pod.")
    time: Time = Field(description="When the container ended.")


class Recovery(ApiModel):
    """One interruption, and how it was overcome."""

    id: Annotated[str, Field(max_length=64)] = Field(description="`a<attempt>`, or the trainer's id for one in place.")
    attempt: Count = Field(description="The attempt that took over, or that went on.")
    reason: Annotated[str, Field(max_length=64)] = Field(
        description="A class of docs/failures.md, or SpecChanged, AvoidanceLifted, EngineLost or ServerRestarted."
    )
    rule: Annotated[str, Field(max_length=63)] | None = Field(
        default=None, description="For NodeHealth: name of the rule that asked to leave the node."
    )
    node: Identifier = Field(default="", description="Node on which it happened.")
    resumed_from: Text = Field(default="", description="Model and operation number from which replay started.")
    replayed_operations: Count | None = Field(default=None, description="Operations that were computed again.")
    lost_operations: Count | None = Field(default=None, description="Acknowledged operations that were lost.")
    seconds: Decimal | None = Field(
        default=None, description="From detection until every model was restored; absent while it goes on."
    )
    time: Time = Field(description="When it was detected.")


class RestStatus(ApiModel):
    """Why the session has no pod, on purpose."""

    state: Literal["Suspended", "Idle", "Stopped", "Failed"] = Field(description="The phase once every pod is gone.")
    since: Time = Field(description="When its pods were told to go.")
    generation: Count | None = Field(
        default=None, description="Failed: generation of the spec that failed; another one is tried."
    )
    wake: Annotated[str, Field(max_length=128)] = Field(
        default="", description="Idle: value of the annotation everloop.dev/wake then; another one ends the rest."
    )


class LeavingStatus(ApiModel):
    """Snapshots that are being written because the pod will be removed in good order."""

    request: Annotated[str, Field(max_length=253)] = Field(description="Name of the request to the trainer.")
    since: Time = Field(description="When they were asked for.")


class TrainingSessionStatus(ApiModel):
    """What the session is."""

    observed_generation: Count | None = Field(default=None, description="Generation of the spec that this is about.")
    phase: Literal[
        "",
        "Queued",
        "Pending",
        "Starting",
        "Running",
        "Recovering",
        "Moving",
        "Stopping",
        "Suspended",
        "Idle",
        "Stopped",
        "Failed",
    ] = Field(
        default="",
        description="The conditions in one word: Pending (no node yet), Queued (the scheduler finds "
        "no node for its pod, or a scheduling gate keeps it back), Starting, Running (serves), Recovering "
        "(between a loss and serving again), Moving (the same after leaving a node in good order), Stopping (its pod "
        "is going, on purpose), Suspended, Idle, Stopped, Failed (see condition Stalled).",
    )
    attempt: Count = Field(default=0, description="Number of the current attempt; each has a pod of its own.")
    endpoint: Text = Field(default="", description="Where clients reach the session: the gateway.")
    pod: PodStatus | None = Field(default=None, description="The pod of the current attempt.")
    leaving: LeavingStatus | None = Field(
        default=None, description="Snapshots that are being written because the pod will be removed in good order."
    )
    rest: RestStatus | None = Field(default=None, description="Why the session has no pod, on purpose.")
    base_model: BaseModelStatus | None = Field(default=None, description="The base model as it was loaded.")
    storage: StorageStatus | None = Field(default=None, description="The storage that the session recovers from.")
    model_count: Count = Field(default=0, description="Number of models.")
    models: Annotated[list[ModelStatus], Field(max_length=MAX_MODELS)] = Field(
        default=[],
        description=f"The models, most trained first; at most {MAX_MODELS}.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"]},
    )
    latest_checkpoint: LatestCheckpoint | None = Field(default=None, description="The newest checkpoint of all models.")
    budgets: BudgetsStatus | None = Field(default=None, description="How much of each budget is used.")
    failure: FailureStatus | None = Field(
        default=None, description="The last container of the session that ended otherwise than well."
    )
    recovery_count: Count = Field(default=0, description="Interruptions that were overcome or are being overcome.")
    recoveries: Annotated[list[Recovery], Field(max_length=MAX_RECOVERIES)] = Field(
        default=[],
        description=f"The last {MAX_RECOVERIES} of them, oldest first.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"]},
    )
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(
        default=[],
        description="Ready, Reconciling, Stalled (as kstatus defines them), Serving, PodsReady, VolumesReady, "
        "BaseModelReady, NodesHealthy, CopiesCurrent.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
