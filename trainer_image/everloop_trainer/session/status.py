"""The session's state as plain values: what `GET /status` answers and the operator copies into the resource."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from everloop_trainer.session.work import Work

State = Literal["Starting", "Recovering", "Serving"]
Reason = Literal["EngineLost", "ServerRestarted", "PodReplaced"]


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One claim of the storage. `boot` counts server starts within one pod, from 1."""

    number: int
    attempt: int
    boot: int
    pod_uid: str


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The one base model of this session; `aliases` are further names by which clients may ask for it."""

    name: str
    revision: str
    manifest_sha256: str
    aliases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AutomaticCheckpoints:
    """Seconds between two automatic checkpoints of a model, 0 for none; how many of a model are kept, at least 1."""

    every: float = 0.0
    keep: int = 1


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """A named checkpoint; `time` is RFC 3339, `size` in bytes."""

    name: str
    step: int
    time: str
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model: `seq` is the last number finished, `pending` counts accepted operations without a result."""

    id: str
    model_id: str
    rank: int
    step: int
    seq: int
    pending: int
    latest_checkpoint: CheckpointStatus | None


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery that ended with every model restored; `seconds` since the loss or the server's start."""

    id: str
    reason: Reason
    resumed_from: str
    replayed_operations: int
    lost_operations: int
    seconds: float
    time: str


@dataclass(frozen=True, slots=True)
class UnderwayStatus:
    """An operation without a result: `seconds` since an engine began it, None if none has; `deaths` as in `poison`."""

    operation: str
    seconds: float | None
    deaths: int


@dataclass(frozen=True, slots=True)
class CopiesReport:
    """How the copies are: how many states have none yet, when the last was made (RFC 3339), what is in the way.

    `finished`: what was wanted last is copied as far as it can be, and nothing more is tried.
    """

    pending: int = 0
    last_time: str = ""
    error: str = ""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Everything that the operator shows of a session."""

    state: State
    incarnation: Incarnation
    lineage: str
    base_model: BaseModel
    engine_pid: int | None
    engine_restarts: int
    models: tuple[ModelStatus, ...]
    last_snapshot_time: str
    storage_error: str
    replay_mismatches: int
    recoveries: tuple[Recovery, ...]
    snapshot_request: tuple[str, int] | None
    """Name of the latest request for snapshots, and how many models it still waits for."""
    idle_seconds: float
    """Since the last call of any client, and since the last operation ended; 0 while one runs or may run."""
    underway: UnderwayStatus | None
    checkpoints: AutomaticCheckpoints
    """As they are taken now."""
    work: Work = field(default_factory=Work)
    copies: CopiesReport | None = None
    """None where there is nowhere to copy anything to."""
    waiting_operations: int = 0
    """Accepted and without a result, those that run among them."""

    def to_json(self) -> dict[str, Any]:
        """The body of `GET /status`."""
        return {
            "state": self.state,
            "incarnation": {
                "number": self.incarnation.number,
                "attempt": self.incarnation.attempt,
                "boot": self.incarnation.boot,
                "podUID": self.incarnation.pod_uid,
            },
            "lineage": self.lineage,
            "baseModel": {
                "name": self.base_model.name,
                "revision": self.base_model.revision,
                "manifestSHA256": self.base_model.manifest_sha256,
            },
            "engine": {"pid": self.engine_pid, "restarts": self.engine_restarts},
            "models": [_model_to_json(model) for model in self.models],
            "lastSnapshotTime": self.last_snapshot_time,
            "storage": {"error": self.storage_error},
            "replayMismatches": self.replay_mismatches,
            "waitingOperations": self.waiting_operations,
            "recoveries": [
                {
                    "id": recovery.id,
                    "reason": recovery.reason,
                    "resumedFrom": recovery.resumed_from,
                    "replayedOperations": recovery.replayed_operations,
                    "lostOperations": recovery.lost_operations,
                    "seconds": f"{recovery.seconds:.1f}",
                    "time": recovery.time,
                }
                for recovery in self.recoveries
            ],
            "snapshotRequest": {"id": self.snapshot_request[0], "pending": self.snapshot_request[1]}
            if self.snapshot_request
            else None,
            "idleSeconds": int(self.idle_seconds),
            "checkpoints": {"everySeconds": self.checkpoints.every, "keepLast": self.checkpoints.keep},
            "work": self.work.to_json(),
            "underway": {
                "operation": self.underway.operation,
                "seconds": None if self.underway.seconds is None else int(self.underway.seconds),
                "deaths": self.underway.deaths,
            }
            if self.underway
            else None,
            "copies": None
            if self.copies is None
            else {"pending": self.copies.pending, "lastTime": self.copies.last_time, "error": self.copies.error},
        }


def _model_to_json(model: ModelStatus) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": model.id,
        "modelId": model.model_id,
        "rank": model.rank,
        "step": model.step,
        "seq": model.seq,
        "pending": model.pending,
    }
    if model.latest_checkpoint is not None:
        checkpoint = model.latest_checkpoint
        shown["latestCheckpoint"] = {
            "name": checkpoint.name,
            "step": checkpoint.step,
            "time": checkpoint.time,
            "path": checkpoint.path,
            "bytes": checkpoint.size,
        }
    return shown
