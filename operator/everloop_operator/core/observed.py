"""All that a decision may rest on, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import TrainingSessionStatus

from .node_rules import Signal
from .refusals import Refusal
from .report import TrainerReport

R = TypeVar("R")


def within(age: timedelta, seconds: float) -> bool:
    """Whether something of this age, by our own clock, is younger than so many seconds.

    A negative age tells that the clock was set back; nothing must wait for as long as that.
    """
    return timedelta(0) <= age < timedelta(seconds=seconds)


@dataclass(frozen=True, slots=True)
class Session:
    """A TrainingSession as read from the API server; `spec` is None where `problem` says why it can't be read."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    spec: TrainingSessionSpec | None
    status: TrainingSessionStatus
    problem: str = ""
    paused: bool = False
    """Whether nothing of it is to be changed."""
    finalizers: tuple[str, ...] = ()
    deletion_time: datetime | None = None
    """When its deletion was asked for."""
    made_by_gateway: bool = False
    wake: str = ""
    """Value of the annotation whose change ends an idle rest."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a pod, as its kubelet reports it."""

    waiting_reason: str = ""
    waiting_message: str = ""
    restarts: int = 0
    exit_code: int | None = None
    """Exit code of the latest run that ended."""
    exit_reason: str = ""
    exit_message: str = ""
    finished: datetime | None = None
    running: bool = False
    started: datetime | None = None
    """Since when it runs; None while it does not."""

    @property
    def begun(self) -> bool:
        """Whether it runs, or has run."""
        return self.running or self.restarts > 0 or self.exit_code is not None


@dataclass(frozen=True, slots=True)
class Pod:
    """A session pod."""

    name: str
    uid: str
    attempt: int
    created: datetime
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    ready: bool = False
    scheduled: datetime | None = None
    unschedulable_since: datetime | None = None
    unschedulable_message: str = ""
    gates: tuple[str, ...] = ()
    """What keeps the scheduler from looking at it, such as a queue that has no room."""
    deletion_requested: datetime | None = None
    disruption: str = ""
    """Why it is about to be disrupted (condition DisruptionTarget); empty if it is not."""
    failure: str = ""
    """Reason and message of a failed pod."""
    gpus: int = 0
    template_hash: str = ""
    avoided_nodes: frozenset[str] = frozenset()
    container: Container = field(default_factory=Container)
    """The trainer."""
    fetch: Container = field(default_factory=Container)
    """What fills the model cache before it."""

    @property
    def queued(self) -> bool:
        """Whether it waits for a node, and it is known for what."""
        return not self.node and (self.unschedulable_since is not None or bool(self.gates))

    @property
    def terminal(self) -> bool:
        """Whether it has ended for good: its kubelet has reported that no container runs."""
        return self.phase in ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class Node:
    """A node. Its Ready condition counts only as True or not: absent means unknown, never healthy."""

    name: str
    uid: str
    hostname: str
    ready: bool
    reason: str = ""
    not_ready_since: datetime | None = None
    """When this operator first saw it not Ready, by its own clock."""
    out_of_service: bool = False
    signals: tuple[Signal, ...] = ()
    """What the installation's rules find at it."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A PersistentVolume: what it comes from, which decides what may be kept on it."""

    source: str
    """Its CSI driver, or the key of its kind in the spec of the volume (`nfs`, `hostPath`, `local`)."""
    node_local: bool = False
    """Whether only one node has what is on it."""
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim."""

    name: str
    uid: str
    phase: str
    access_modes: frozenset[str]
    volume_name: str = ""
    volume: Volume | None = None
    """None while it is not bound, or where the operator may not read volumes."""
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """The newest thing that the cluster has said of an object in an event."""

    reason: str
    message: str
    time: datetime


@dataclass(frozen=True)  # a generic class that is frozen can't have slots in Python 3.11
class Answer(Generic[R]):
    """What is known of the server in a pod from asking it for its report."""

    report: R | None = None
    """Its latest answer, however old."""
    unreachable_since: datetime | None = None
    """Since when it has not answered; None while it does."""
    problem: str = ""
    """Why the last request failed."""
    idle_since: datetime | None = None
    """Since when nobody has called and nothing has run, by our own clock; None while the session is used. Of the
    progress reader of a driver: since when there has been nothing new."""
    running_since: datetime | None = None
    """Since when the operation that runs has run; None if none runs, or it has only just begun."""


Trainer = Answer[TrainerReport]
"""Of the server of the current session pod."""

STEADY_SECONDS = 5.0
"""By how much a time may move from answer to answer before it counts as another one: answers take their time."""


def answered(before: Trainer, report: TrainerReport, now: datetime) -> Trainer:
    """What is known after an answer. Seconds that pass in the trainer become times: what does not change is equal."""
    underway = report.underway
    timeless = {"idle_seconds": 0, "underway": underway.model_copy(update={"seconds": None}) if underway else None}
    return Trainer(
        report=report.model_copy(update=timeless),
        idle_since=_steady(before.idle_since, now, report.idle_seconds),
        running_since=_steady(before.running_since, now, (underway.seconds if underway else None) or 0),
    )


def _steady(before: datetime | None, now: datetime, seconds: int) -> datetime | None:
    """When it began, as it was said before if that is about the same; None for what has only just begun."""
    since = now - timedelta(seconds=seconds) if seconds else None
    if since and before and abs(since - before) < timedelta(seconds=STEADY_SECONDS):
        return before
    return since


@dataclass(frozen=True, slots=True)
class Observed:
    """One complete observation."""

    now: datetime
    session: Session
    pods: tuple[Pod, ...] = ()
    """Its own pods."""
    taken_attempts: frozenset[int] = frozenset()
    """Attempts whose names are still taken by pods of a deleted TrainingSession of the same name."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """By name: all nodes."""
    nodes_watched: bool = True
    """Whether the operator may see nodes. Where not, a node that is not in `nodes` may be there."""
    hosting: Mapping[str, int] = field(default_factory=dict)
    """Node name -> number of session pods on it, over all TrainingSessions."""
    claims: Mapping[str, Claim | None] = field(default_factory=dict)
    """By name; None where there is none of this name. A claim that could not be read is absent."""
    notices: Mapping[str, Notice] = field(default_factory=dict)
    """By `<kind>/<name>`: of claims that are not bound, and of a pod whose containers do not start."""
    trainer: Trainer = field(default_factory=Trainer)
    refusal: Refusal | None = None
