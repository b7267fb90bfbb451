"""Which optim_step must fail because its accumulation window held a failure. Pure.

A loop submits an optim_step before it knows how its forward_backward ended. If that one failed, applying what else
was accumulated would be an update that nobody asked for. Once the client was told of the failure, the optim_steps
that it sends are meant. "Told" is what the journal says: the position of the failure's `deliver` record against that
of the optim_step's `accept` record, so that a replay decides the same.

What was accumulated by operations that were sent before the client was told is never applied beside such a failure,
whoever was told when: the SDK cuts a large forward_backward into several operations and fails it as a whole, and
nothing in them says which belong together. What had ended before the failed operation was sent is no part of the same
call: its first part, before which none runs, is sent last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everloop_trainer.session.operations import Arguments, ForwardBackward, LoadWeights, OptimStep, Refused
from everloop_trainer.session.ports import Position


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed operation of the window.

    `beside` is the number of an operation that added gradients before the client was told of the failure; None if the
    client was not told of it at all when it sent the optim_step.
    """

    seq: int
    beside: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """What the window rule looks at in a finished operation of a model."""

    seq: int
    args: Arguments
    ok: bool
    gradients_dropped: bool
    accepted: Position
    ended: Position
    delivered: Position | None

    @property
    def given_up(self) -> bool:
        """Whether its number never arrived: one record stands for both, and tells nothing of when it was sent."""
        return self.accepted == self.ended


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


def _is_forward_backward(operation: Finished) -> bool:
    args = operation.args
    return isinstance(args, ForwardBackward) or (isinstance(args, Refused) and args.operation == ForwardBackward.KIND)


def added_gradients(operation: Finished) -> bool:
    """Whether this operation left gradients in the accumulator."""
    return isinstance(operation.args, ForwardBackward) and operation.ok and not operation.args.forward_only


def spoiling_failure(finished: Iterable[Finished], accepted: Position) -> Failure | None:
    """The first failure for which an optim_step must fail, or None if it may be applied.

    Args:
        finished: the model's finished operations before the optim_step, in order.
        accepted: position of the optim_step's accept record.
    """
    window: list[Finished] = []
    for operation in finished:
        if closes_window(operation):
            window.clear()
        else:
            window.append(operation)
    failures = [operation for operation in window if is_failure(operation)]
    for failure in failures:
        if failure.delivered is None or accepted < failure.delivered:
            return Failure(failure.seq)
    for failure in failures:
        for operation in window:
            if not _is_forward_backward(failure) or not added_gradients(operation):
                continue  # a refused optim_step or load leaves what was accumulated as it was meant
            if operation.ended < failure.accepted and not failure.given_up:
                continue
            if failure.delivered is not None and operation.accepted < failure.delivered:
                return Failure(failure.seq, operation.seq)
    return None
