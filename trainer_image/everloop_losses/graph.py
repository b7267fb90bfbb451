"""A traced loss, checked: from the JSON of `create_custom_loss` to nodes whose references and operations are known.

The form is that of the SDK (`tinker/types/custom_loss_graph.py`, format 1). Pure functions over plain values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everloop_losses.operations import ATTRIBUTES, CONSTANTS, FUNCTIONS, METHODS, TEXT_OPTIONS

FORMAT = 1
MAX_NODES = 1000
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_DEPTH = 8
LONGEST_TEXT = 128
"""Characters of names, targets and other texts."""

LOGPROBS = "logprobs"
"""The first input: log-probabilities of the targets, by which the loss is differentiated."""
GETATTR = "getattr"

_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_FLOATS = frozenset({"inf", "-inf", "nan"})
_REFUSED_OPS = {
    "get_attr": "a loss may read only its inputs, not tensors from elsewhere",
    "call_module": "a loss may call functions only, not modules",
}
_OTHER_WAY = "a function of (data, logprobs) given to forward_backward_custom runs in your own process and may call all"


class GraphError(ValueError):
    """What was sent is no loss that can be run; the message begins with the field."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier node, in the place of an argument."""

    node: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A value of torch itself: its kind (`dtype`, `device`, ...) and its name there."""

    kind: str
    name: str


Argument = Any
"""None, bool, int, float, str, Ref, Constant, Ellipsis, or a list, tuple, dict or slice of these."""


@dataclass(frozen=True, slots=True)
class Input:
    """What the loss is given of each datum: rank 0 is a scalar, 1 is (T,), 2 is (T, K). `node` has the value."""

    name: str
    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class Node:
    """A call; the first argument of a method is its tensor."""

    name: str
    is_method: bool
    target: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]


@dataclass(frozen=True, slots=True)
class TracedLoss:
    """A loss of one datum. `result` names the node that has it, `metrics` those of each key on the wire."""

    name: str
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    result: str
    metrics: Mapping[str, str]


def read(name: object, inputs: object, graph: object) -> TracedLoss:
    """Check a loss as `create_custom_loss` has it.

    Raises:
        GraphError: names the field, and of a call also its operation.
    """
    title = _text("name", name)
    declared = _inputs(inputs)
    form = _object("graph", graph, {"format", "nodes"})
    if form.get("format", FORMAT) != FORMAT:
        raise GraphError(f"graph.format: must be {FORMAT}, got {_shown(form['format'])}")
    nodes = _list("graph.nodes", form.get("nodes"), MAX_NODES)
    if len(nodes) < len(declared) + 1:
        raise GraphError(f"graph.nodes: {len(declared)} inputs and an output are needed, got {len(nodes)} nodes")
    known: set[str] = set()
    given: list[Input] = []
    calls: list[Node] = []
    for index, value in enumerate(nodes):
        field = f"graph.nodes[{index}]"
        node = _object(field, value, {"op", "name", "target", "args", "kwargs"})
        own, target = _text(f"{field}.name", node.get("name")), _text(f"{field}.target", node.get("target"))
        args = _list(f"{field}.args", node.get("args", []))
        kwargs = _mapping(f"{field}.kwargs", node.get("kwargs", {}))
        if own in known:
            raise GraphError(f"{field}.name: {own!r} is given twice")
        if index < len(declared):
            name_, rank = declared[index]
            if node.get("op") != "placeholder" or target != name_ or args or kwargs:
                raise GraphError(f"{field}: must be the placeholder of input {name_!r}, without arguments")
            given.append(Input(name_, rank, own))
        elif index == len(nodes) - 1:
            if node.get("op") != "output" or len(args) != 1 or kwargs:
                raise GraphError(f"{field}: must be the output, of one argument")
            result, metrics = _output(f"{field}.args[0]", _argument(f"{field}.args[0]", args[0], known))
            return TracedLoss(title, tuple(given), tuple(calls), result, metrics)
        else:
            calls.append(_call(field, node.get("op"), own, target, args, kwargs, known))
        known.add(own)
    raise AssertionError("the last node is the output")


def _inputs(value: object) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for index, each in enumerate(_list("inputs", value, MAX_INPUTS)):
        form = _object(f"inputs[{index}]", each, {"name", "rank"})
        name, rank = form.get("name"), form.get("rank")
        if not (isinstance(name, str) and _INPUT.fullmatch(name)):
            raise GraphError(f"inputs[{index}].name: must be a lowercase name, got {_shown(name)}")
        if type(rank) is not int or rank not in (0, 1, 2):
            raise GraphError(f"inputs[{index}].rank: must be 0, 1 or 2, got {_shown(rank)}")
        if name in dict(found):
            raise GraphError(f"inputs[{index}].name: {name!r} is given twice")
        found.append((name, rank))
    if not found or found[0][0] != LOGPROBS or found[0][1] == 0:
        raise GraphError(f"inputs[0]: must be {LOGPROBS}, of rank 1 or 2")
    return found


def _call(
    field: str, op: object, name: str, target: str, args: list[Any], kwargs: Mapping[str, Any], known: set[str]
) -> Node:
    if op not in ("call_function", "call_method"):
        reason = _REFUSED_OPS.get(op) if isinstance(op, str) else None
        raise GraphError(f"{field}.op: {_shown(op)} is not accepted here{f': {reason}' if reason else ''}")
    is_method = op == "call_method"
    if target not in (METHODS if is_method else FUNCTIONS):
        kind = "method" if is_method else "function"
        raise GraphError(f"{field} ({name}): {kind} {target} is not one that traced losses are made of; {_OTHER_WAY}")
    if target == GETATTR and not is_method:
        attribute = args[1] if len(args) == 2 and not kwargs else None
        if not (isinstance(attribute, str) and attribute in ATTRIBUTES):
            raise GraphError(f"{field} ({name}): attribute {_shown(attribute)} is none that can be read; {_OTHER_WAY}")
        return Node(name, False, target, (_argument(f"{field}.args[0]", args[0], known), attribute), {})
    read_args = tuple(_argument(f"{field}.args[{index}]", arg, known) for index, arg in enumerate(args))
    if is_method and not (read_args and isinstance(read_args[0], Ref)):
        raise GraphError(f"{field}.args[0]: must be the tensor that has the method")
    read_kwargs = {}
    for key, arg in kwargs.items():
        where = f"{field}.kwargs.{_shown(key)}"
        if not _KEYWORD.fullmatch(key):
            raise GraphError(f"{where}: is no keyword")
        if key == "out" and arg is not None:
            raise GraphError(f"{where}: a loss writes nowhere")
        read_kwargs[key] = _text(where, arg) if key in TEXT_OPTIONS else _argument(where, arg, known)
    return Node(name, is_method, target, read_args, read_kwargs)


def _argument(field: str, value: Any, known: set[str], depth: int = MAX_DEPTH) -> Argument:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise GraphError(f"{field}: must fit 64 bits")
        return value
    if isinstance(value, float):
        if value in (float("inf"), float("-inf")) or value != value:
            raise GraphError(f'{field}: must be finite, or {{"float": "inf"}}')
        return value
    if isinstance(value, str):
        raise GraphError(f"{field}: text {_shown(value)} is taken as {', '.join(sorted(TEXT_OPTIONS))} only")
    if depth == 0:
        raise GraphError(f"{field}: is nested too deeply")
    if isinstance(value, list):
        return [_argument(f"{field}[{index}]", each, known, depth - 1) for index, each in enumerate(value)]
    if not (isinstance(value, dict) and len(value) == 1):
        raise GraphError(f"{field}: {_shown(value)} is no argument")
    ((kind, content),) = value.items()
    return _tagged(f"{field}.{_shown(kind)}", kind, content, known, depth - 1)


def _tagged(field: str, kind: str, content: Any, known: set[str], depth: int) -> Argument:
    if kind == "ref":
        if content not in known if isinstance(content, str) else True:
            raise GraphError(f"{field}: {_shown(content)} is no earlier node")
        return Ref(content)
    if kind == "float" and isinstance(content, str) and content in _FLOATS:
        return float(content)
    if kind == "ellipsis" and content is True:
        return ...
    if kind in CONSTANTS and isinstance(content, str) and content in CONSTANTS[kind]:
        return Constant(kind, content)
    if kind == "dict" and isinstance(content, dict):
        return {key: _argument(f"{field}.{_shown(key)}", each, known, depth) for key, each in content.items()}
    if kind in ("tuple", "slice") and isinstance(content, list):
        parts = [_argument(f"{field}[{index}]", each, known, depth) for index, each in enumerate(content)]
        if kind == "tuple":
            return tuple(parts)
        if len(parts) == 3:
            return slice(*parts)
    raise GraphError(f"{field}: {_shown(content)} is no argument that traced losses take")


def _output(field: str, value: Argument) -> tuple[str, dict[str, str]]:
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise GraphError(f"{field}: must be the loss and its metrics")
    loss, told = value
    if not isinstance(loss, Ref):
        raise GraphError(f"{field}: the loss must be a tensor that was computed")
    if not isinstance(told, dict) or len(told) > MAX_METRICS:
        raise GraphError(f"{field}: the metrics must be a dict of at most {MAX_METRICS}")
    metrics = {}
    for key, metric in told.items():
        if not _METRIC.fullmatch(key):
            raise GraphError(f"{field}: metric {_shown(key)} must be named custom/<name>:sum or custom/<name>:mean")
        if not isinstance(metric, Ref):
            raise GraphError(f"{field}: metric {key} must be a tensor that was computed")
        metrics[key] = metric.node
    return loss.node, metrics


def _text(field: str, value: object) -> str:
    if not (isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT and value.isprintable()):
        raise GraphError(f"{field}: must be a text of 1 to {LONGEST_TEXT} characters, got {_shown(value)}")
    return value


def _list(field: str, value: object, most: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise GraphError(f"{field}: must be a list")
    if most is not None and len(value) > most:
        raise GraphError(f"{field}: {len(value)} are more than {most}")
    return value


def _mapping(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise GraphError(f"{field}: must be an object")
    return value


def _object(field: str, value: object, fields: set[str]) -> Mapping[str, Any]:
    """A field that is not known could mean another loss."""
    found = _mapping(field, value)
    for key in found.keys() - fields:
        raise GraphError(f"{field}.{_shown(key)}: is not known")
    return found


def _shown(value: object, longest: int = 80) -> str:
    """As an error message has it; what is nested may be nested without end."""
    text = repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return text if len(text) <= longest else f"{text[:longest]}..."
