"""What a served schema lacks of the one that this version was built for: fields, and words that a field may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def lacking(own: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Paths of fields that the API server would prune, the outermost only, such as `status.rest`.

    And words that it would refuse, such as `status.phase: Queued`.
    """
    return list(_lacking(own, served, ""))


def _lacking(own: Mapping[str, Any], served: Mapping[str, Any], path: str) -> Iterator[str]:
    there = served.get("properties", {})
    for name, schema in own.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        if where in ("apiVersion", "kind", "metadata"):
            continue
        if name in there:
            yield from _lacking(schema, there[name], where)
        else:
            yield where
    if "enum" in served:
        yield from (f"{path}: {word}" for word in own.get("enum", ()) if word not in served["enum"])
    if "items" in own:
        yield from _lacking(own["items"], served.get("items", {}), f"{path}[]")
