"""What the progress reader of a driver pod reports, read tolerantly: a newer one may say more."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from everloop_operator.core.report import MaybeStamp

Number = Annotated[str, StringConstraints(max_length=32, pattern=r"^-?[0-9]+(\.[0-9]+)?$")]
Location = Annotated[str, StringConstraints(max_length=512)]
Iteration = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore", frozen=True)


class Point(_Part):
    """A checkpoint and the iteration after which it was saved; iteration 0 and no checkpoint is the beginning."""

    iteration: Iteration = 0
    checkpoint: Location = ""


class EvaluationReport(_Part):
    """The newest evaluation."""

    iteration: Iteration
    metric: Annotated[str, StringConstraints(max_length=128)]
    value: Number
    time: MaybeStamp = None


class BestReport(_Part):
    """The best iteration with a checkpoint, by the metric that was asked for."""

    iteration: Iteration
    checkpoint: Location
    value: Number


class ProgressReport(_Part):
    """The whole report."""

    state: Literal["Starting", "Stale", "Started"]
    """Stale: the storage holds a newer checkpoint than this pod's driver was to start from, so it does not start."""
    attempt: int
    problem: Annotated[str, StringConstraints(max_length=1024)] = ""
    """What could not be read, for people; empty while all is well."""
    resume: Point = Point()
    """What the next driver goes on from, as the storage says now."""
    iteration: Iteration = 0
    iterations: Iteration = 0
    """Finished iterations, each counted once."""
    reward: Number | None = None
    evaluation: EvaluationReport | None = None
    best: BestReport | None = None
    goal_reached: Iteration | None = None
    """The iteration in which the goal that was asked for was reached."""
    seconds_per_iteration: Number | None = None
    done: bool = False
    """Whether the driver has said, with the last iteration, that its work is done."""

    @property
    def read(self) -> bool:
        """Whether the storage has been read."""
        return self.state != "Starting"
