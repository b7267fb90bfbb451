"""Small records for tests of the journal."""

from __future__ import annotations

from everloop_trainer.session.operations import ForwardBackward
from everloop_trainer.session.records import Accept
from tests.session.world import TIME, A


def accept(seq: int) -> Accept:
    return Accept(A, seq, ForwardBackward(False, "cross_entropy"), TIME)
