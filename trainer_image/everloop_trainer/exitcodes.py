"""Exit codes by which the server tells its supervisor, and the container its kubelet, why it ended."""

from __future__ import annotations

FENCED = 64
"""Another incarnation owns the storage: this pod is superseded."""

STORAGE_MISMATCH = 65
"""The storage belongs to another base model: no restart can help."""

STORAGE_FAILED = 66
"""A write or flush failed: a new incarnation must take over from what is durable."""

ACCELERATOR_FAILED = 67
"""An engine found its accelerator broken: only a pod on another node can help. Of an engine, and then of the pod."""

BAD_CONFIGURATION = 78
"""`EVERLOOP_CONFIG` or the environment is unusable (EX_CONFIG of sysexits.h)."""

FINAL = frozenset({FENCED, STORAGE_MISMATCH, BAD_CONFIGURATION})
"""Codes after which the supervisor does not restart the server: the container ends with the same code."""
