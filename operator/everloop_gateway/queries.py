"""The query of an address."""

from __future__ import annotations

from collections.abc import Iterable

from everloop_gateway.ids import shorten
from everloop_gateway.refusal import Refusal


def once(parameters: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The value of each parameter. Raises Refusal for one that is given twice: who reads either would mean another."""
    values: dict[str, str] = {}
    for name, value in parameters:
        if name in values:
            raise Refusal(400, f"{shorten(name)}: given more than once")
        values[name] = value
    return values
