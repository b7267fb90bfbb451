"""How much memory a process may still take: what its control groups and its machine leave.

Engines compute in host memory. A pod's memory limit is a control group's, in version 2 or 1 of the interface
(Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst); without one the node's memory is the limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STATE_VECTORS = 4
"""Float32 vectors of an adapter in training: weights, two moments of Adam, and gradients."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that may still be taken, out of `total`, and whose limit that is."""

    free: int
    total: int
    of: str


@dataclass(frozen=True, slots=True)
class _Interface:
    """Where a version of the interface keeps what is needed of it."""

    mount: str
    limit: str
    usage: str
    inactive: str


_V1 = _Interface("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Interface("", "memory.max", "memory.current", "inactive_file")


def model_bytes(parameters: int) -> int:
    """What an adapter of so many trained values takes with optimizer and gradients."""
    return STATE_VECTORS * 4 * parameters


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Available:
    """The tightest of this process's limits. Raises OSError, and ValueError if the kernel says nothing of memory."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE))
    if not meminfo.keys() >= {"MemAvailable", "MemTotal"}:
        raise ValueError(f"{proc / 'meminfo'}: no MemAvailable or no MemTotal")
    found = [Available(1024 * int(meminfo["MemAvailable"]), 1024 * int(meminfo["MemTotal"]), "the node's memory")]
    for directory, interface in _groups((proc / "self" / "cgroup").read_text(), groups):
        within = _of_group(directory, interface)
        if within is not None:
            found.append(within)
    return min(found, key=lambda each: each.free)


def _groups(text: str, root: Path) -> Iterator[tuple[Path, _Interface]]:
    """The process's memory groups from its own up to the one that is mounted.

    A container may see its own group as the mounted one, under a path that leads nowhere in it.
    """
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            interface = _V1
        elif number == "0":
            interface = _V2
        else:
            continue
        mount = root / interface.mount
        own = mount / path.lstrip("/")
        yield from ((each, interface) for each in (own, *own.parents) if each.is_relative_to(mount))


def _of_group(directory: Path, interface: _Interface) -> Available | None:
    """What a group leaves; None if it has no limit, or is none. Files that nobody uses give way, as kubelets count."""
    try:
        limit = (directory / interface.limit).read_text().strip()
        usage = int((directory / interface.usage).read_text())
        stat = (directory / "memory.stat").read_text()
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    match = re.search(rf"^{interface.inactive} (\d+)$", stat, re.MULTILINE)
    inactive = int(match[1]) if match is not None else 0
    return Available(int(limit) - max(0, usage - inactive), int(limit), "the memory limit of the pod")
