"""Which processes of this machine are in a pod's containers, as the files of the container runtimes say."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.processes import Process, all_pids, command_line
from devcluster.settings import Layout


@dataclass(frozen=True, slots=True)
class PodProcess:
    """A process in a container."""

    pid: int
    """Its number on the host."""
    node: str
    container: str
    """The container's name in the pod."""
    argv: tuple[str, ...]


def pod_processes(layout: Layout, pod: str, namespace: str) -> list[PodProcess]:
    """Return every process in the containers of a pod, the containers' first processes first.

    Args:
        layout: the cluster's.
        pod: name or UID.
        namespace: of the pod; does not matter for a UID.
    """
    found = []
    for directory in sorted((layout.root / "nodes").glob("*/cri/containers/*")):
        facts, started = _read(directory / "facts.json"), _read(directory / "started.json")
        if not facts or not started:
            continue
        sandbox = _read(directory.parents[1] / "sandboxes" / facts["sandbox"] / "facts.json")
        if not sandbox or (sandbox["uid"] != pod and (sandbox["namespace"], sandbox["pod"]) != (namespace, pod)):
            continue
        first = Process(started["pid"], started["pid_ticks"])
        if first.alive():
            node = directory.parents[2].name
            found += [PodProcess(pid, node, facts["name"], tuple(command_line(pid))) for pid in _members(first.pid)]
    return found


def _members(first: int) -> list[int]:
    """Return the processes of the container with this first process: its PID namespace, or its descendants."""
    namespace = _pid_namespace(first)
    if namespace and namespace != _pid_namespace(os.getpid()):
        others = [pid for pid in all_pids() if pid != first and _pid_namespace(pid) == namespace]
    else:
        others = list(_descendants(first))
    return [first, *sorted(others)]


def _pid_namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _descendants(pid: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
