"""What the operator reports about an RLJob. Only the operator writes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .schema import ApiModel, Count, Decimal, SignedDecimal, Text, Time
from .training_session_status import MAX_RECOVERIES, BudgetStatus, Condition, Identifier, PodStatus

MAX_LOG_TAIL = 2048

Location = Annotated[str, Field(max_length=512)]
"""A tinker:// path."""


class JobSessionStatus(ApiModel):
    """The TrainingSession that the job trains on."""

    name: Identifier = Field(description="Its name.")
    uid: Identifier = Field(default="", description="Its UID; empty while there is none.")
    model: Location = Field(
        default="", description="The model that the job's latest checkpoint was saved of; empty while there is none."
    )


class Progress(ApiModel):
    """How far the job is, as its driver reports it."""

    iteration: Count = Field(default=0, description="The last finished iteration.")
    iterations: Count = Field(default=0, description="How many were finished, each counted once.")
    max_iterations: Count | None = Field(default=None, description="The limit of the spec; absent if there is none.")
    reward: SignedDecimal | None = Field(default=None, description="Reward of the last iteration.")
    eta_seconds: Count | None = Field(
        default=None, description="Seconds until the limit of iterations, at the present pace; absent if unknown."
    )


class Evaluation(ApiModel):
    """The newest evaluation."""

    iteration: Count = Field(description="The iteration that it is of.")
    metric: Annotated[str, Field(max_length=128)] = Field(
        description="Name of its metric: that of the goal if the goal is one of an evaluation, else the first."
    )
    value: SignedDecimal = Field(description="Its value.")
    time: Time | None = Field(default=None, description="When it was made, if the driver said so.")


class JobCheckpoint(ApiModel):
    """The checkpoint that the next driver goes on from."""

    iteration: Count = Field(default=0, description="The iteration after which it was saved.")
    location: Location = Field(default="", description="Its tinker:// path; empty to start anew.")


class BestCheckpoint(ApiModel):
    """The checkpoint of the iteration that was best by the goal's metric."""

    iteration: Count = Field(description="The iteration after which it was saved.")
    location: Location = Field(description="Its tinker:// path.")
    value: SignedDecimal = Field(description="Value of the goal's metric in that iteration.")


class JobBudgetsStatus(ApiModel):
    """How much of each budget is used."""

    infrastructure: BudgetStatus = Field(default=BudgetStatus(), description="Lost nodes, lost and evicted drivers.")
    application: BudgetStatus = Field(default=BudgetStatus(), description="Drivers that ended with an error.")


class JobRecovery(ApiModel):
    """One driver that was replaced."""

    id: Annotated[str, Field(max_length=64)] = Field(description="`a<attempt>` of the driver that took over.")
    attempt: Count = Field(description="The attempt that took over.")
    reason: Annotated[str, Field(max_length=64)] = Field(
        description="NodeLost, NodeGone, PodLost, PodFailed, PodDeleted, SpecChanged, DriverFailed, NoProgress, "
        "NewerCheckpoint or Resumed."
    )
    node: Identifier = Field(default="", description="Node of the driver that was replaced.")
    iteration: Count = Field(default=0, description="The iteration after which the next driver goes on.")
    seconds: Decimal | None = Field(
        default=None, description="From detection until the next driver ran; absent while it goes on."
    )
    time: Time = Field(description="When it was detected.")


class LossStatus(ApiModel):
    """Why the current driver is over, while it has no successor yet."""

    reason: Annotated[str, Field(max_length=64)] = Field(description="As in `recoveries`.")
    message: Text = Field(default="", description="Why, in words for people.")
    budget: Literal["infrastructure", "application", "none"] = Field(
        description="The budget that its successor will use."
    )
    node: Identifier = Field(default="", description="Node of the driver.")


class Failure(ApiModel):
    """The last driver that ended with an error."""

    reason: Annotated[str, Field(max_length=64)] = Field(description="Why, in one word for programs.")
    attempt: Count = Field(default=0, description="Its attempt.")
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = Field(default=None, description="Its exit code.")
    remedy: Text = Field(default="", description="What to do about it.")
    log_tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)] = Field(
        default="", description="The end of its output, without what looks like a secret."
    )


class RLJobStatus(ApiModel):
    """What the job is."""

    observed_generation: Count | None = Field(default=None, description="Generation of the spec that this is about.")
    phase: Literal["", "Queued", "Pending", "Running", "Recovering", "Suspended", "Completed", "Failed"] = Field(
        default="",
        description="The conditions in one word: Pending (no driver has run yet), Queued (its session or its first "
        "driver is), Running, Recovering (between two drivers), Suspended, Completed (see condition Complete), Failed "
        "(see condition Stalled).",
    )
    attempt: Count = Field(default=0, description="Number of the current driver; each has a pod of its own.")
    session: JobSessionStatus | None = Field(default=None, description="The TrainingSession that the job trains on.")
    pod: PodStatus | None = Field(default=None, description="The pod of the current driver.")
    progress: Progress | None = Field(default=None, description="How far the job is.")
    evaluation: Evaluation | None = Field(default=None, description="The newest evaluation.")
    latest_checkpoint: JobCheckpoint | None = Field(
        default=None, description="The checkpoint that the next driver goes on from."
    )
    best_checkpoint: BestCheckpoint | None = Field(default=None, description="The best checkpoint, if there is a goal.")
    active_seconds: Count = Field(
        default=0, description="Seconds for which the job was neither suspended nor finished, before `activeSince`."
    )
    active_since: Time | None = Field(
        default=None, description="Since when it is neither suspended nor finished; absent while it is."
    )
    finish_time: Time | None = Field(default=None, description="When it was Completed, or Failed for good.")
    budgets: JobBudgetsStatus | None = Field(default=None, description="How much of each budget is used.")
    loss: LossStatus | None = Field(
        default=None, description="Why the current driver is over, while it has no successor yet."
    )
    recovery_count: Count = Field(default=0, description="Drivers that were replaced.")
    recoveries: Annotated[list[JobRecovery], Field(max_length=MAX_RECOVERIES)] = Field(
        default=[],
        description=f"The last {MAX_RECOVERIES} of them, oldest first.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"]},
    )
    failure: Failure | None = Field(default=None, description="The last driver that ended with an error.")
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(
        default=[],
        description="Ready, Reconciling, Stalled (as kstatus defines them), Complete, SessionReady, PodsReady.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
