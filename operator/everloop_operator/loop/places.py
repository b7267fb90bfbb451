"""Who depends on which node, so that a change of one costs no look at everybody."""

from __future__ import annotations

from collections import Counter

from .ports import Key


class Places:
    """Names of nodes or hosts -> the objects that depend on each, and how often."""

    def __init__(self) -> None:
        self._keys: dict[str, Counter[Key]] = {}

    def count(self, name: str, key: Key, change: int) -> None:
        """One more (+1) or one less (-1) reason for which the object depends on this place; '' is none."""
        if not name:
            return
        keys = self._keys.setdefault(name, Counter())
        keys[key] += change
        if not keys[key]:
            del keys[key]
        if not keys:
            del self._keys[name]

    def at(self, name: str) -> set[Key]:
        """The objects that depend on this place."""
        return set(self._keys.get(name, ()))
