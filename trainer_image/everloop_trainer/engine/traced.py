"""Runs traced losses: each node is an operation of the closed set, on the CPU, in the precision that its tensors have.

On the CPU everywhere: an index out of range is an error there, and on an accelerator the end of it. What a node would
return is worked out without memory first (torch's `meta` device), and what all nodes return together is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everloop_losses.graph import GETATTR, Constant, Node, Ref, TracedLoss
from everloop_trainer.engine.errors import ContentError, out_of_memory
from everloop_trainer.engine.operations import CONSTANT_VALUES, FUNCTIONS, METHODS, plain_index

MAX_VALUES = 2**26
"""Values of all tensors of one datum, those that are views of others counted as well: 256 MiB of float32."""
MAX_WORK = 2**31
"""The same, of all datums of one operation."""
_LEAST = 64
"""What a tensor counts at least: the object itself needs memory, too."""
_LARGEST = 2**63
_DTYPES = frozenset(value for key, value in CONSTANT_VALUES.items() if key.kind == "dtype")
_META = torch.device("meta")
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, AttributeError, AssertionError)
"""What torch and Python raise of arguments that don't fit."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a loss gives of one datum: its value, its slope by each log-probability (None without gradient), metrics."""

    loss: float
    slope: Tensor | None
    metrics: Mapping[str, float]


class Evaluation:
    """Evaluates one loss on the datums of one operation, and counts what that takes."""

    def __init__(self, loss: TracedLoss) -> None:
        self._loss = loss
        self._work = 0

    def run(self, field: str, logprobs: Tensor, inputs: Sequence[NDArray[Any]]) -> Told:
        """Evaluate it on a datum, with the slope where gradients are enabled; `field` names the datum.

        Raises ContentError, naming the node.
        """
        own = logprobs.detach().to("cpu", copy=True).requires_grad_(torch.is_grad_enabled())
        tensors = [own, *(torch.from_numpy(np.array(each)) for each in inputs)]
        values: dict[str, Any] = {each.node: value for each, value in zip(self._loss.inputs, tensors, strict=True)}
        room = MAX_VALUES
        for node in self._loss.nodes:
            where = f"{field}: loss {self._loss.name!r}, node {node.name!r} ({node.target})"
            room -= self._compute(where, node, values, room)
        self._work += MAX_VALUES - room
        if self._work > MAX_WORK:
            raise ContentError(f"{field}: loss {self._loss.name!r} takes more than {MAX_WORK} values for these datums")
        return self._told(f"{field}: loss {self._loss.name!r}", own, values)

    def _compute(self, where: str, node: Node, values: dict[str, Any], room: int) -> int:
        """Add the value of a node; return what it counts."""
        args = [_resolved(each, values) for each in node.args]
        kwargs = {key: _resolved(each, values) for key, each in node.kwargs.items()}
        operation = (METHODS if node.is_method else FUNCTIONS)[node.target]
        try:
            counted = _foreseen(node, operation, args, kwargs)
            if counted > room:
                raise ContentError(f"{where}: {counted} values are more than is left of {MAX_VALUES} for a datum")
            found = operation(*args, **kwargs)
        except _ERRORS as error:
            _refuse(where, error)
        _check(where, found)
        values[node.name] = found
        return counted

    def _told(self, where: str, logprobs: Tensor, values: Mapping[str, Any]) -> Told:
        result = values[self._loss.result]
        if not isinstance(result, Tensor) or result.ndim or not result.is_floating_point():
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ContentError(f"{where}: must be a scalar of floating point, got {shape}")
        metrics = {key: _number(f"{where}, metric {key}", values[node]) for key, node in self._loss.metrics.items()}
        return Told(result.item(), _slope(where, result, logprobs), metrics)


def _slope(where: str, result: Tensor, logprobs: Tensor) -> Tensor | None:
    if not logprobs.requires_grad:
        return None
    slope = None
    if result.requires_grad:
        try:
            (slope,) = torch.autograd.grad(result, logprobs, allow_unused=True)
        except _ERRORS as error:
            _refuse(f"{where}: the gradient", error)
    if slope is None:
        raise ContentError(f"{where}: does not depend on logprobs")
    if not torch.isfinite(slope).all():
        raise ContentError(f"{where}: its gradient by logprobs is not finite")
    return slope


def _refuse(where: str, error: Exception) -> NoReturn:
    if isinstance(error, RuntimeError) and out_of_memory(error):
        raise error
    raise ContentError(f"{where}: {(str(error) or type(error).__name__).splitlines()[0]}") from error


def _number(where: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach().item())
    if isinstance(value, int | float):
        return float(value)
    raise ContentError(f"{where}: must be a single number")


def _resolved(argument: Any, values: Mapping[str, Any]) -> Any:
    """The argument with the values of the nodes that it refers to."""
    if isinstance(argument, Ref):
        return values[argument.node]
    if isinstance(argument, Constant):
        return CONSTANT_VALUES[argument]
    return _mapped(argument, lambda each: _resolved(each, values))


def _mapped(value: Any, change: Any) -> Any:
    """A list, tuple, dict or slice with each of its parts changed; anything else as it is."""
    if isinstance(value, list):
        return [change(each) for each in value]
    if isinstance(value, tuple):
        return tuple(change(each) for each in value)
    if isinstance(value, dict):
        return {key: change(each) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(change(value.start), change(value.stop), change(value.step))
    return value


def _foreseen(node: Node, operation: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    """How many values the operation would return, without computing them."""
    if node.target == GETATTR or node.target.startswith("math."):
        return 0
    if node.target == "operator.getitem":
        if not isinstance(args[0], Tensor):
            return 0
        args = [args[0], *map(plain_index, args[1:])]
        if _masks(args[-1]):
            return max(_LEAST, args[0].numel())
    with torch.no_grad():
        return _counted(operation(*_without_memory(args), **_without_memory(kwargs)))


def _masks(index: Any) -> int:
    """How many masks an index has. More than one, or one beside other tensors, could select more than there is."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [each for each in parts if isinstance(each, Tensor | list)]
    masks = sum(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in tensors)
    if masks and len(tensors) > 1:
        raise IndexError("a mask must be the only tensor of an index")
    return masks


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=_META)
    if isinstance(value, torch.device):
        return _META
    return _mapped(value, _without_memory)


def _counted(value: Any) -> int:
    if isinstance(value, Tensor):
        return max(_LEAST, value.numel())
    return sum(map(_counted, value)) if isinstance(value, tuple | list) else 0


def _check(where: str, value: Any) -> None:
    """Refuse what no operation may work on: a number without end, complex or sparse tensors, anything foreign."""
    if isinstance(value, Tensor):
        if value.dtype not in _DTYPES or value.layout is not torch.strided or value.is_meta:
            raise ContentError(f"{where}: a tensor of {value.dtype} is not supported")
    elif isinstance(value, tuple | list):
        for each in value:
            _check(where, each)
    elif isinstance(value, bool | float | torch.dtype | torch.device):
        pass
    elif not (isinstance(value, int) and -_LARGEST <= value < _LARGEST):
        raise ContentError(f"{where}: gives no tensor, and no number of 64 bits")
