"""RLJob: a training program of the user's, driven to its goal on a TrainingSession.

The models here are the only definition; `crd.py` derives the CRD from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .pod_overlay import Annotations, Environment, OwnLabels, PodAdditions
from .rl_job_status import Location, RLJobStatus
from .schema import CONTROL, ApiModel, ContainerResources, SignedDecimal, one_of, rules
from .training_session import MAX_NAME_LENGTH, ApplicationBudget, Budget, TrainingSessionSpec

METRIC_PATTERN = r"^[A-Za-z0-9_]([A-Za-z0-9_./-]*[A-Za-z0-9_])?$"

Word = Annotated[str, Field(max_length=4096)]
GIVEN = ("TINKER_API_KEY", "TINKER_BASE_URL")
"""Variables that the operator sets, beside those that no environment may have."""


class SessionReference(ApiModel):
    """A TrainingSession that others may use too."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] = Field(
        description="Name of the TrainingSession, in the namespace of this object."
    )


class TemplateMetadata(ApiModel):
    """Metadata of the TrainingSession that is made."""

    labels: OwnLabels = Field(default={}, description="Labels of the TrainingSession.")
    annotations: Annotations = Field(default={}, description="Annotations of the TrainingSession.")


class SessionTemplate(ApiModel):
    """A TrainingSession of the job's own, with the job's name."""

    metadata: TemplateMetadata = Field(default=TemplateMetadata(), description="Its labels and annotations.")
    spec: TrainingSessionSpec = Field(description="Its spec.")


class JobSession(ApiModel):
    """The TrainingSession that the job trains on."""

    ref: SessionReference | None = Field(default=None, description="One that is there; the job never changes it.")
    template: SessionTemplate | None = Field(
        default=None, description="One that is made for the job, suspended with it and removed with it."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.ref) != has(self.template)", "exactly one of ref and template is required"))
    )


class StartCheckpoint(ApiModel):
    """A checkpoint to start from."""

    uri: Annotated[Location, Field(pattern=rf"^tinker://[^/{CONTROL}]+/weights/[^/{CONTROL}]+$")] = Field(
        description="Its tinker:// path; it must lie in a TrainingSession of this namespace."
    )


class StartSpec(ApiModel):
    """What the first driver starts from."""

    checkpoint: StartCheckpoint = Field(description="Given to the first driver as EVERLOOP_RESUME_FROM.")


class GoalSpec(ApiModel):
    """When the job has achieved what it is for."""

    metric: Annotated[str, Field(min_length=1, max_length=128, pattern=METRIC_PATTERN)] = Field(
        description="`reward`, a metric of the iterations, or `eval/<name>` for a metric of the evaluations."
    )
    value: SignedDecimal = Field(description="The value to be reached.")
    direction: Literal["AtLeast", "AtMost"] = Field(
        default="AtLeast", description="Whether the metric must become as large, or as small, as `value`."
    )
    consecutive: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=1, description="In how many iterations, or evaluations, in a row."
    )


class LimitsSpec(ApiModel):
    """When the job ends without its goal. A change takes effect at once."""

    max_iterations: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Iterations after which the job is Completed with reason LimitReached."
    )
    active_seconds: Annotated[int, Field(ge=1, le=315_360_000)] | None = Field(
        default=None,
        description="Seconds after which the job is Completed with reason LimitReached, but for suspended time.",
    )


class RunnerSpec(ApiModel):
    """The program that drives the training: any that speaks to the session by the tinker SDK."""

    image: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="Its image. A change starts a new driver."
    )
    command: Annotated[list[Word], Field(min_length=1, max_length=64)] = Field(
        description="The command. A change starts a new driver."
    )
    args: Annotated[list[Word], Field(max_length=256)] = Field(
        default=[], description="Arguments of the command. A change starts a new driver."
    )
    env: Environment = Field(default=(), description="More variables of its environment. A change starts a new driver.")
    resources: ContainerResources = Field(
        default=ContainerResources(), description="Its requests and limits. A change starts a new driver."
    )
    pod: PodAdditions = Field(
        default=PodAdditions(),
        description="What the driver's pod has beside what Everloop gives it. A change starts a new driver. Its "
        "securityContext must be able to write where that of the session's pod writes.",
    )
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        default=30, description="Seconds between the request to end and the kill. A change starts a new driver."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.env) || self.env.all(e, !(e.name in {one_of(GIVEN)}))",
                "env: a variable of this name is set by Everloop",
            )
        )
    )


class JobDeadlinesSpec(ApiModel):
    """After which time waiting is taken for failure. A change takes effect at once."""

    progress_seconds: Annotated[int, Field(ge=30, le=604_800)] | None = Field(
        default=None,
        description="Seconds for which a driver may report nothing new while its session serves; later another takes "
        "over, counted in the application budget. Absent: for ever.",
    )


class JobRecoverySpec(ApiModel):
    """How often a driver is replaced. A change takes effect at once."""

    infrastructure: Budget = Field(
        default=Budget(),
        description="Budget for lost nodes and for lost or evicted pods; when it is used up the job is Failed until "
        "it refills.",
    )
    application: ApplicationBudget = Field(
        default=ApplicationBudget(),
        description="Budget for drivers that end with an error; when it is used up the job is Failed for good.",
    )


class RLJobSpec(ApiModel):
    """What the job should do."""

    runtime: Literal["Session"] = Field(
        default="Session",
        description="What the job runs on. Immutable.",
        json_schema_extra=rules(("self == oldSelf", "spec.runtime is immutable")),
    )
    session: JobSession = Field(
        description="The TrainingSession that the job trains on. Immutable.",
        json_schema_extra=rules(("self == oldSelf", "spec.session is immutable")),
    )
    start: StartSpec | None = Field(
        default=None, description="What the first driver starts from; absent for a fresh adapter. Immutable."
    )
    runner: RunnerSpec = Field(description="The program that drives the training.")
    goal: GoalSpec | None = Field(
        default=None, description="When the job is Completed with reason GoalReached. A change takes effect at once."
    )
    limits: LimitsSpec = Field(default=LimitsSpec(), description="When the job ends without its goal.")
    deadlines: JobDeadlinesSpec = Field(
        default=JobDeadlinesSpec(), description="After which time waiting is taken for failure."
    )
    recovery: JobRecoverySpec = Field(default=JobRecoverySpec(), description="How often a driver is replaced.")
    seed: Annotated[int, Field(ge=0, le=9_007_199_254_740_991)] | None = Field(
        default=None, description="Given to the driver as EVERLOOP_SEED. A change starts a new driver."
    )
    suspend: bool = Field(
        default=False,
        description="Whether the job rests: its driver is ended, and its session suspended if the job owns it.",
    )
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=315_360_000)] = Field(
        default=604_800,
        description="Seconds after which the driver's pod and the session that the job owns are removed once it has "
        "finished; the job itself stays.",
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.start) == has(oldSelf.start) && (!has(self.start) || self.start == oldSelf.start)",
                "spec.start is immutable",
            ),
        )
    )


class RLJob(ApiModel):
    """A training program of the user's, driven to its goal on a TrainingSession.

    The program may be killed at any time: another goes on from the last checkpoint that it reported.
    """

    spec: RLJobSpec = Field(description="What the job should do.")
    status: RLJobStatus = Field(default=RLJobStatus(), description="What the job is; written only by the operator.")

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


__all__ = ["RLJob", "RLJobSpec", "RLJobStatus"]
