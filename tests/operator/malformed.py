"""Makes bad objects from good ones: for each field whatever its schema forbids."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.operator.full import Path, Schema, places

WRONG_TYPE: dict[str, Any] = {"string": 7, "integer": "seven", "boolean": "yes", "array": "one", "object": "thing"}
NONSENSE = ("", " ", "/", "..", "-", "A!", "a b", "x" * 70)


@dataclass(frozen=True, slots=True)
class Malformed:
    """An object with one fault."""

    fault: str
    field: str
    """What the refusal must name: the path of the field, as the API server writes it."""
    body: dict[str, Any]


def everything(node: Schema, objects: Iterable[dict[str, Any]], root: str = "spec") -> Iterator[Malformed]:
    """Each kind of fault once for each field below `root`."""
    seen: set[tuple[str, str]] = set()
    for good in objects:
        for name, path, schema, value in places(node, good):
            if not path or path[0] != root:
                continue
            for fault, at, wrong in _faults(schema, value, path):
                if (name, fault) not in seen:
                    seen.add((name, fault))
                    yield Malformed(fault, written(at), replaced(good, at, wrong))


ABSENT = object()


def _faults(node: Schema, value: Any, path: Path) -> Iterator[tuple[str, Path, Any]]:
    kind = node.get("type", "")
    if kind:
        yield "wrong type", path, WRONG_TYPE[kind]
    if "enum" in node:
        yield "not one of the words", path, "Whatever"
    if kind == "integer":
        yield "too small", path, node["minimum"] - 1
        if "maximum" in node:
            yield "too large", path, node["maximum"] + 1
    if kind == "string" and "maxLength" in node:
        yield "too long", path, "a" * (node["maxLength"] + 1)
        if node.get("minLength"):
            yield "too short", path, ""
    if "pattern" in node:
        yield "a line break", path, f"{value}\nx"
        yield "against the pattern", path, next(text for text in NONSENSE if not re.search(node["pattern"], text))
    if kind == "array":
        yield "too many", path, _distinct(value, node)
        if node.get("minItems"):
            yield "too few", path, []
        if node.get("x-kubernetes-list-type") == "map":
            yield "twice the same key", path, [*value, value[0]]
    if "additionalProperties" in node:
        some = next(iter(value.values()))
        yield "too many entries", path, {f"key-{number}": some for number in range(node["maxProperties"] + 1)}
    if "properties" in node:
        yield "unknown field", (*path, "surprise"), "thing"
        for key in node.get("required", ()):
            yield f"without {key}", (*path, key), ABSENT


def _distinct(value: list[Any], node: Schema) -> list[Any]:
    """One item more than allowed; their keys differ."""
    items = []
    for number in range(node["maxItems"] + 1):
        item = copy.deepcopy(value[0])
        for key in node.get("x-kubernetes-list-map-keys", ()):
            item[key] = f"{item[key]}{number}"
        items.append(item)
    return items


def written(path: Path) -> str:
    """A path as the API server writes it."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def replaced(good: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy of the object with another value, or none, at the path."""
    body: dict[str, Any] = copy.deepcopy(good)
    place: Any = body
    for part in path[:-1]:
        place = place[part]
    if value is ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body
