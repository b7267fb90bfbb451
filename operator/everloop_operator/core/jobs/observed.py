"""All that a decision about an RLJob may rest on, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from everloop_operator.api import names
from everloop_operator.api.rl_job import RLJobSpec
from everloop_operator.api.rl_job_status import RLJobStatus
from everloop_operator.core.observed import Answer, Container, Node, Pod, Session
from everloop_operator.core.refusals import Refusal

from .report import Point, ProgressReport


@dataclass(frozen=True, slots=True)
class Job:
    """An RLJob as read from the API server; `spec` is None where `problem` says why it can't be read."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    spec: RLJobSpec | None
    status: RLJobStatus
    problem: str = ""

    @property
    def session_name(self) -> str:
        """Name of the TrainingSession that it trains on."""
        assert self.spec is not None
        return self.spec.session.ref.name if self.spec.session.ref else self.name


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver pod."""

    pod: Pod
    resume: Point
    """What its driver was told to go on from."""
    reader: Container = field(default_factory=Container)
    """Its progress reader."""
    final: ProgressReport | None = None
    """The last report of its progress reader, once that has ended."""


def heard(before: Answer[ProgressReport], report: ProgressReport, now: datetime) -> Answer[ProgressReport]:
    """What is known after an answer of a progress reader, and since when it has been that."""
    since = before.idle_since if report == before.report else now
    return Answer(report=report, idle_since=since)


@dataclass(frozen=True, slots=True)
class SeenSession:
    """The TrainingSession of a job, and the UID of the RLJob that owns it, if one does."""

    session: Session
    owner: str = ""
    suspended: bool = False
    """Whether its spec asks for rest."""

    @property
    def wakes(self) -> bool:
        """Whether it is idle, and a call ends that."""
        spec = self.session.spec
        return self.session.status.phase == names.PHASE_IDLE and spec is not None and spec.idle.on_call == "Wake"

    @property
    def serving_since(self) -> datetime | None:
        """Since when it has served; None while it does not."""
        found = (c for c in self.session.status.conditions if c.type == names.CONDITION_SERVING and c.status == "True")
        return next((datetime.fromisoformat(c.last_transition_time) for c in found), None)


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """One complete observation."""

    now: datetime
    job: Job
    drivers: tuple[Driver, ...] = ()
    """Its own driver pods."""
    taken_attempts: frozenset[int] = frozenset()
    """Attempts whose names are still taken by pods of a deleted RLJob of the same name."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """By name: all nodes."""
    nodes_watched: bool = True
    """Whether the operator may see nodes. Where not, a node that is not in `nodes` may be there."""
    session: SeenSession | None = None
    """None while there is none."""
    progress: Answer[ProgressReport] = field(default_factory=Answer)
    """Of the pod of the latest attempt, though it may be gone."""
    refusal: Refusal | None = None

    @property
    def attempt(self) -> int:
        """The latest attempt that is known of; 0 if there was none."""
        return max([self.job.status.attempt, *(driver.pod.attempt for driver in self.drivers)])

    @property
    def current(self) -> Driver | None:
        """The driver of the latest attempt; None if its pod is gone."""
        return next((driver for driver in self.drivers if driver.pod.attempt == self.attempt), None)

    @property
    def report(self) -> ProgressReport | None:
        """What is known of the latest attempt: its last words, else its latest answer."""
        current = self.current
        found = current.final if current and current.final else self.progress.report
        return found if found and found.attempt == self.attempt and found.read else None
