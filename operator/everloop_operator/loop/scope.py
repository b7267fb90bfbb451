"""How much of the cluster the operator may see."""

from __future__ import annotations

from dataclasses import dataclass

NAMESPACES = "/namespaces/"
NODES = "/nodes"


@dataclass(frozen=True, slots=True)
class Scope:
    """Which namespaces, and whether nodes."""

    namespaces: tuple[str, ...] = ()
    """Empty means all."""
    nodes: bool = True

    def paths(self, path: str) -> tuple[str, ...]:
        """The paths at which the list of all objects, which has this path, can be read within the scope."""
        if path.endswith(NODES):
            return (path,) if self.nodes else ()
        if not self.namespaces or NAMESPACES in path:
            return (path,)
        base, plural = path.rsplit("/", 1)
        return tuple(f"{base}{NAMESPACES}{namespace}/{plural}" for namespace in self.namespaces)
