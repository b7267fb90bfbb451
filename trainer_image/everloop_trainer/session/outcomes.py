"""What a client learns about an operation that it submitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everloop_trainer.session.errors import Category

ContentType = Literal["application/json", "application/x-protobuf"]
JSON: ContentType = "application/json"
PROTOBUF: ContentType = "application/x-protobuf"

QueueState = Literal["active", "paused_capacity"]


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A result, byte for byte as it is delivered each time it is asked for."""

    content_type: ContentType
    body: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """An operation that changed nothing. `category` `user` means that the request was wrong."""

    error: str
    category: Category


Outcome = Succeeded | Failed


@dataclass(frozen=True, slots=True)
class Pending:
    """An accepted operation without a result yet.

    Attributes:
        queue_state: `active`, or `paused_capacity` while no engine can work.
        reason: one sentence for the user; the SDK shows it.
        position: operations of this session that run before it; 0 when it is running.
    """

    queue_state: QueueState
    reason: str
    position: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """No such operation was accepted."""
