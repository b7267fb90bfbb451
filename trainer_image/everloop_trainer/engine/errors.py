"""Failures of one operation that leave the engine and its state as they were."""

from __future__ import annotations


class ContentError(Exception):
    """What the user sent cannot be computed; the message starts with the field, e.g. `data[1].loss_fn: ...`."""


class StateError(Exception):
    """A model is not loaded, an operation comes out of order, or a state file is not what it should be."""
