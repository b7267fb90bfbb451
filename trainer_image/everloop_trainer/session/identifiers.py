"""How models, sampling sessions, requests and checkpoints are named. Pure string functions."""

from __future__ import annotations

import hashlib

TRAINING = ":train:"
SAMPLING = ":sample:"
_LONGEST_NUMBER = 19  # digits of 2^63 - 1
CREATION = 0
"""Number of a model's creation in its own stream; the client's `seq_id` counts from 1."""


def model_id(session_id: str, model_seq_id: int) -> str:
    """Name of a model, as the tinker SDK computes it."""
    return f"{session_id}{TRAINING}{model_seq_id}"


def sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    """Name of a sampling session."""
    return f"{session_id}{SAMPLING}{sampling_session_seq_id}"


def request_id(stream: str, seq: int) -> str:
    """Name of one operation: a pure function of its stream and number."""
    return f"{stream}:{seq}"


def split_request_id(request: str) -> tuple[str, int] | None:
    """Stream and number of a request id, or None if it is none."""
    stream, _, seq = request.rpartition(":")
    if not (is_model(stream) or is_sampler(stream)):
        return None
    if not (seq.isascii() and seq.isdecimal() and len(seq) <= _LONGEST_NUMBER):
        return None
    return stream, int(seq)


def is_model(stream: str) -> bool:
    """Whether a stream is a model's (ordered) one."""
    return TRAINING in stream


def is_sampler(stream: str) -> bool:
    """Whether a stream is a sampling session's (unordered) one."""
    return SAMPLING in stream


def session_of(stream: str) -> str:
    """The client's session that a model or a sampling session belongs to."""
    return stream.partition(":")[0]


def storage_id(model: str) -> str:
    """Short name of a model for directories and status: `m-` and 12 hex digits."""
    return "m-" + hashlib.sha256(model.encode()).hexdigest()[:12]


def tinker_path(model: str, kind: str, name: str) -> str:
    """Address of a named checkpoint; `kind` as in records.CheckpointKind."""
    return f"tinker://{model}/{kind}/{name}"
