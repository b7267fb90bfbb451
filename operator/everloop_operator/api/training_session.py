"""TrainingSession: a base model that serves training steps as API calls on many LoRA adapters.

The models here are the only definition; `crd.py` derives the CRD from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .base_model import BaseModelSpec
from .pod_overlay import PodOverlay
from .schema import ApiModel, ContainerResources, rules
from .storage import StorageSpec
from .training_session_status import TrainingSessionStatus

MAX_NAME_LENGTH = 40
"""Children add `-a<attempt>-<rank>` and `-a<attempt>-token`, and a label value ends at 63 characters."""


class ImagesSpec(ApiModel):
    """What is taken of images, where the base model takes any. A change starts a new attempt."""

    max_bytes: Annotated[int, Field(ge=1024, le=33_554_432)] = Field(
        default=8_388_608, description="Greatest size of one image as it is sent, in bytes."
    )
    max_pixels: Annotated[int, Field(ge=1024, le=67_108_864)] = Field(
        default=16_777_216,
        description="Greatest size of one image once it is decoded, in pixels; read from its header, before that.",
    )


class EngineSpec(ApiModel):
    """How the engine computes. Results depend on all of it."""

    dtype: Literal["Float32", "BFloat16"] = Field(
        default="Float32",
        description="Type of the base model's weights in memory; adapters and optimizer are always float32. Immutable.",
        json_schema_extra=rules(("self == oldSelf", "spec.engine.dtype is immutable")),
    )
    max_sequence_length: Annotated[int, Field(ge=16, le=1_048_576)] = Field(
        default=2048, description="Longest sequence that is accepted, in tokens. A change starts a new attempt."
    )
    threads: Annotated[int, Field(ge=1, le=256)] = Field(
        default=2,
        description="CPU threads of the engine. The last bits of results depend on it. A change starts a new attempt.",
    )
    images: ImagesSpec = Field(
        default=ImagesSpec(), description="What is taken of images, where the base model takes any."
    )


class WorkersSpec(ApiModel):
    """The pod that holds the base model."""

    resources: ContainerResources = Field(
        default=ContainerResources(), description="Resources of the trainer container. A change starts a new attempt."
    )


class AdaptersSpec(ApiModel):
    """Limits on the LoRA adapters of this session. A change starts a new attempt."""

    max_models: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=16, description="How many adapters may exist at a time."
    )
    max_rank: Annotated[int, Field(ge=1, le=1024)] = Field(default=128, description="Highest rank of an adapter.")


class SnapshotsSpec(ApiModel):
    """Internal snapshots, from which a recovery replays."""

    replay_budget_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=20,
        description="Seconds of computing that a recovery may have to repeat for a model; reaching it starts a "
        "snapshot in the background. Cheap snapshots are taken more often. A change starts a new attempt.",
    )


class CheckpointsSpec(ApiModel):
    """Automatic checkpoints of each adapter, from which a client goes on whose own process died."""

    every_seconds: Annotated[int, Field(ge=0, le=604_800)] = Field(
        default=1800,
        description="Seconds between two automatic checkpoints of an adapter, taken at the next optimizer step, with "
        "optimizer state, under the name `auto-<step>`; 0 for none. A change takes effect at once.",
    )
    keep_last: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=2,
        description="How many automatic checkpoints of an adapter are kept; older ones are deleted. What a client "
        "saved itself is never deleted for it. A change takes effect at once.",
    )


class Budget(ApiModel):
    """How often something may happen within a moving window."""

    max_attempts: Annotated[int, Field(ge=0, le=100)] = Field(
        default=20, description="Replacements within the window; when they are used up the session is Failed."
    )
    window_seconds: Annotated[int, Field(ge=60, le=2_592_000)] = Field(
        default=86_400, description="Length of the window in seconds; what is older refills the budget."
    )


class ApplicationBudget(Budget):
    """How often something may happen within a moving window."""

    max_attempts: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3, description="Failures within the window; with one more it is Failed."
    )
    window_seconds: Annotated[int, Field(ge=60, le=2_592_000)] = Field(
        default=3600, description="Length of the window in seconds; what is older refills the budget."
    )


class RecoverySpec(ApiModel):
    """How lost pods and nodes are replaced. A change takes effect at once."""

    infrastructure: Budget = Field(
        default=Budget(), description="Budget for lost nodes and for lost or failed pods; deletions are not counted."
    )
    application: ApplicationBudget = Field(
        default=ApplicationBudget(),
        description="Budget for what the session does to itself: a container that crashes, a start that fails, memory "
        "that runs out twice at one operation, an operation without progress.",
    )
    checkpoint_deadline_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        default=30,
        description="Seconds for which a pod that is to leave its node may write snapshots before another takes over. "
        "Nothing is lost without them; they shorten the replay.",
    )
    force_delete_after_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        default=120,
        description="Seconds after which a replaced pod that does not go away is removed from the API without proof "
        "that it is dead. Only when the journal's claim is ReadWriteMany, where the journal itself fences it off.",
    )
    avoid_seconds: Annotated[int, Field(ge=0, le=2_592_000)] = Field(
        default=86_400, description="Seconds for which this session is kept off a node that failed under it."
    )


class DeadlinesSpec(ApiModel):
    """After which time waiting is reported as failure. A change takes effect at once."""

    startup_seconds: Annotated[int, Field(ge=30, le=86_400)] = Field(
        default=1800,
        description="Seconds from a pod's scheduling, or from the loss of its engine, until it serves; later the "
        "session is Failed with reason StartupDeadlineExceeded until it serves after all.",
    )
    unschedulable_seconds: Annotated[int, Field(ge=30, le=604_800)] = Field(
        default=3600,
        description="Seconds for which a pod may find no node; later the session is Failed with reason "
        "UnschedulableDeadlineExceeded until a node is found after all.",
    )
    progress_seconds: Annotated[int, Field(ge=30, le=604_800)] = Field(
        default=1800,
        description="Seconds for which one operation may run in the engine; later another pod takes over and runs it "
        "again, counted in the application budget. In the end the operation fails.",
    )


class IdleSpec(ApiModel):
    """When a session that nobody uses gives its GPUs back. A change takes effect at once."""

    after_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        default=3600,
        description="Seconds without a call or a running operation after which the models are snapshotted and the pod "
        "is removed; 0 for never. Nothing is lost by it. Heartbeats of a client that does nothing else do not count.",
    )
    on_call: Literal["Wake", "Refuse"] = Field(
        default="Wake",
        description="Wake: the next call brings the pod back, and waits for it. Refuse: new models are refused, and "
        "calls of those that exist wait until the annotation everloop.dev/wake is changed.",
    )


class DeletionSpec(ApiModel):
    """What happens before the object goes. A change takes effect at once, also while it is being deleted."""

    wait_for_copies: bool = Field(
        default=False,
        description="True: a finalizer keeps the object, and its pod, until the checkpoints that are to be copied are.",
    )
    deadline_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        default=300, description="Seconds after which the object goes all the same, whatever is down."
    )


class TrainingSessionSpec(ApiModel):
    """What the session should be."""

    base_model: BaseModelSpec = Field(
        description="The frozen model that adapters are trained on. Immutable.",
        json_schema_extra=rules(("self == oldSelf", "spec.baseModel is immutable")),
    )
    image: Annotated[str, Field(max_length=512)] = Field(
        default="",
        description="Trainer image; empty means the image of the Everloop installation. A change starts a new attempt.",
    )
    engine: EngineSpec = Field(default=EngineSpec(), description="How the engine computes.")
    workers: WorkersSpec = Field(default=WorkersSpec(), description="The pod that holds the base model.")
    adapters: AdaptersSpec = Field(default=AdaptersSpec(), description="Limits on the LoRA adapters of this session.")
    storage: StorageSpec = Field(description="Storage that the session recovers from.")
    snapshots: SnapshotsSpec = Field(
        default=SnapshotsSpec(), description="Internal snapshots, from which a recovery replays."
    )
    checkpoints: CheckpointsSpec = Field(
        default=CheckpointsSpec(),
        description="Automatic checkpoints, from which a client goes on whose own process died.",
    )
    recovery: RecoverySpec = Field(default=RecoverySpec(), description="How lost pods and nodes are replaced.")
    deadlines: DeadlinesSpec = Field(
        default=DeadlinesSpec(), description="After which time waiting is reported as failure."
    )
    idle: IdleSpec = Field(default=IdleSpec(), description="When a session that nobody uses gives its GPUs back.")
    suspend: bool = Field(
        default=False,
        description="True: the models are snapshotted and the pod is removed, which frees its GPUs; calls wait until "
        "it is false again, and then everything goes on. Calls never end a suspension. Takes effect at once.",
    )
    stop: bool = Field(
        default=False,
        description="True: as `suspend`, for ever. Calls fail; what is in storage stays. Cannot be taken back.",
        json_schema_extra=rules(("self || !oldSelf", "spec.stop cannot be taken back")),
    )
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=315_360_000)] = Field(
        default=86_400,
        description="Seconds after which the pods of a session that Failed for good are removed; until the spec is "
        "changed none is made again. A session made by the gateway is then deleted, and so is one that it made and "
        "that was Stopped for so long; what is in storage stays. Takes effect at once.",
    )
    deletion: DeletionSpec = Field(default=DeletionSpec(), description="What happens before the object goes.")
    pod: PodOverlay = Field(default=PodOverlay(), description="What the session pod has beside what Everloop gives it.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.pod.terminationGracePeriodSeconds > self.recovery.checkpointDeadlineSeconds",
                "spec.pod.terminationGracePeriodSeconds must be greater than spec.recovery.checkpointDeadlineSeconds",
            ),
            (
                "has(self.baseModel.source.claim) || has(self.storage.modelCache)",
                "spec.storage.modelCache must be set where spec.baseModel.source is huggingFace or s3",
            ),
        )
    )


class TrainingSession(ApiModel):
    """A base model, resident in a pod, that serves training steps as API calls on many LoRA adapters.

    The session outlives its pod: when the pod or its node is lost, another pod takes over from the journal, and the
    clients' loops go on.
    """

    spec: TrainingSessionSpec = Field(description="What the session should be.")
    status: TrainingSessionStatus = Field(
        default=TrainingSessionStatus(), description="What the session is; written only by the operator."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
                f"metadata.name must not be longer than {MAX_NAME_LENGTH} characters",
            ),
            (
                "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must consist of lower-case letters, digits and '-'",
            ),
        ),
    )


__all__ = ["MAX_NAME_LENGTH", "TrainingSession", "TrainingSessionSpec", "TrainingSessionStatus"]
