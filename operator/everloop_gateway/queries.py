"""The query of an address."""

from __future__ import annotations

from collections.abc import Iterable

from everloop_gateway.refusal import Refusal

READ = frozenset({"access_scope", "expires", "limit", "mac", "offset", "project_id", "waited"})
"""What some call reads; other parameters are nobody's business, however often they are given."""


def once(parameters: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The value of each parameter. Raises Refusal for one that is read and given twice: either may be meant."""
    values: dict[str, str] = {}
    for name, value in parameters:
        if name in values and name in READ:
            raise Refusal(400, f"{name}: given more than once")
        values[name] = value
    return values
