"""What the operations of traced losses do: torch's own functions, each under the name that the SDK sends.

`everloop_losses.operations` has the names. Nothing is looked up in a module by what a client wrote: a name that is
not in these tables is none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from everloop_losses.graph import GETATTR, Constant
from everloop_losses.operations import ATTRIBUTES, CONSTANTS
from everloop_losses.operations import FUNCTIONS as FUNCTION_NAMES
from everloop_losses.operations import METHODS as METHOD_NAMES

Operation = Callable[..., Any]

MAX_PIECES = 1024
"""Tensors that one operation may return."""
_POWER_BITS = 64


def _check_pieces(count: int) -> None:
    if count > MAX_PIECES:
        raise ValueError(f"{count} pieces are more than {MAX_PIECES}")


def _chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    _check_pieces(min(chunks, tensor.size(dim)))
    return tensor.chunk(chunks, dim)


def _split(tensor: Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    size = split_size_or_sections
    _check_pieces(len(size) if isinstance(size, list | tuple) else tensor.size(dim) // max(size, 1))
    return tensor.split(size, dim)


def _unbind(tensor: Tensor, dim: int = 0) -> Any:
    _check_pieces(tensor.size(dim))
    return tensor.unbind(dim)


def _arithmetic(apply: Operation) -> Operation:
    """An operator of Python on tensors and numbers: on lists or texts it would do something else."""

    def applied(*operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, Tensor | int | float):
                raise TypeError(f"a {type(operand).__name__} is no operand")
        return apply(*operands)

    return applied


def _dividing(apply: Operation) -> Operation:
    """A division; of whole numbers one has a quotient that its type can't hold, and ends the process (SIGFPE)."""

    def applied(input: Any, other: Any, **options: Any) -> Any:
        if isinstance(input, Tensor) or isinstance(other, Tensor):
            kind = torch.result_type(input, other)
            if not (kind.is_floating_point or kind is torch.bool):
                dividend, divisor = torch.as_tensor(input), torch.as_tensor(other)
                least = dividend == torch.iinfo(kind).min
                if not (dividend.is_meta or divisor.is_meta) and least.any() and (divisor == -1).any():
                    raise OverflowError("the quotient is beyond its type")
        return apply(input, other, **options)

    return applied


def _power(base: Any, exponent: Any) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and math.log2(abs(base)) * exponent > _POWER_BITS:
        raise OverflowError("the power is beyond 64 bits")
    return operator.pow(base, exponent)


def _item(container: Any, index: Any) -> Any:
    if isinstance(container, Tensor):
        return container[plain_index(index)]
    if isinstance(container, tuple | list):
        return container[plain_index(index) if isinstance(index, slice) else operator.index(index)]
    raise TypeError(f"a {type(container).__name__} has no items")


def plain_index(index: Any) -> Any:
    """The index with numbers in its slices; a tensor of one whole number is one there, as in Python."""
    if isinstance(index, tuple):
        return tuple(plain_index(each) for each in index)
    if isinstance(index, slice):
        return slice(
            *(None if each is None else operator.index(each) for each in (index.start, index.stop, index.step))
        )
    return index


def _of_numbers(function: Callable[..., Any]) -> Operation:
    """A function of math; a tensor of one element is a number there, as in Python."""

    def applied(*numbers: Any) -> Any:
        return function(*(float(each) if isinstance(each, Tensor) else each for each in numbers))

    return applied


def _attribute(value: Any, name: str) -> Any:
    if not isinstance(value, Tensor | tuple):
        raise TypeError(f"a {type(value).__name__} has no {name}")
    return _ATTRIBUTES[name](value)


_DIVISIONS = (torch.div, torch.divide, torch.floor_divide, torch.remainder, torch.fmod)
_ATTRIBUTES: Mapping[str, Operation] = MappingProxyType({name: operator.attrgetter(name) for name in ATTRIBUTES})
_MODULES: Mapping[str, Any] = MappingProxyType(
    {
        "torch": torch,
        "torch.functional": torch.functional,
        "torch.nn.functional": functional,
        "torch._C._nn": torch._C._nn,
        "operator": operator,
        "math": math,
    }
)
_OWN: Mapping[str, Operation] = MappingProxyType(
    {
        **{f"torch.{each.__name__}": _dividing(each) for each in _DIVISIONS},
        "operator.floordiv": _arithmetic(_dividing(operator.floordiv)),
        "operator.mod": _arithmetic(_dividing(operator.mod)),
        GETATTR: _attribute,
        "operator.getitem": _item,
        "operator.pow": _arithmetic(_power),
        "torch.chunk": _chunk,
        "torch.split": _split,
        "torch.functional.split": _split,
        "torch.unbind": _unbind,
    }
)
"""Those that do less than torch's or Python's."""


def _function(name: str) -> Operation:
    if name in _OWN:
        return _OWN[name]
    module, _, function = name.rpartition(".")
    found: Operation = getattr(_MODULES[module], function)
    wrap = {"operator": _arithmetic, "math": _of_numbers}.get(module)
    return found if wrap is None else wrap(found)


FUNCTIONS: Mapping[str, Operation] = MappingProxyType({name: _function(name) for name in FUNCTION_NAMES})
METHODS: Mapping[str, Operation] = MappingProxyType(
    {name: _OWN.get(f"torch.{name}", getattr(Tensor, name)) for name in METHOD_NAMES}
)
CONSTANT_VALUES: Mapping[Constant, Any] = MappingProxyType(
    {
        Constant(kind, name): torch.device(name) if kind == "device" else getattr(torch, name)
        for kind, names in CONSTANTS.items()
        for name in names
    }
)
