"""Which optim_step must fail because its accumulation window held a failure. Pure.

A loop submits an optim_step before it knows how its forward_backward ended. If that one failed, applying what else
was accumulated would be an update that nobody asked for. Once the client was told of the failure, the optim_steps
that it sends are meant. "Told" is what the journal says: the position of the failure's `deliver` record against that
of the optim_step's `accept` record, so that a replay decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everloop_trainer.session.operations import Arguments, ForwardBackward, LoadWeights, OptimStep, Refused
from everloop_trainer.session.ports import Position


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed operation of the window; `delivered` is where the journal says that the client is told, if it does."""

    seq: int
    delivered: Position | None


@dataclass(frozen=True, slots=True)
class Finished:
    """What the window rule looks at in a finished operation of a model."""

    seq: int
    args: Arguments
    ok: bool
    gradients_dropped: bool
    delivered: Position | None


def closes_window(operation: Finished) -> bool:
    """Whether the accumulation window ends with this operation: its gradients were applied or dropped."""
    if isinstance(operation.args, LoadWeights):
        return operation.ok
    return isinstance(operation.args, OptimStep) and (operation.ok or operation.gradients_dropped)


def is_failure(operation: Finished) -> bool:
    """Whether this operation leaves a gap in its window: one that was to change the model and changed nothing."""
    if operation.ok or operation.gradients_dropped:
        return False
    match operation.args:
        case ForwardBackward(forward_only=forward_only):
            return not forward_only
        case Refused(operation="forward_backward", forward_only=forward_only):
            return not forward_only
        case OptimStep() | LoadWeights() | Refused(operation="optim_step" | "load_weights"):
            return True
        case _:
            return False


def untold_failure(finished: Iterable[Finished], accepted: Position) -> Failure | None:
    """The first failure of the open window that the client had not been told of when the optim_step was accepted.

    Args:
        finished: the model's finished operations before the optim_step, in order.
        accepted: position of the optim_step's accept record.
    """
    window: list[Finished] = []
    for operation in finished:
        if closes_window(operation):
            window.clear()
        elif is_failure(operation):
            window.append(operation)
    for failure in window:
        if failure.delivered is None or accepted < failure.delivered:
            return Failure(failure.seq, failure.delivered)
    return None
