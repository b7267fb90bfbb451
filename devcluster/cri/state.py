"""Sandboxes and containers as the runtime keeps them: one directory each, so that a restarted runtime finds them."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import cri_pb2 as pb  # type: ignore[import-not-found]

from devcluster.processes import Process


def read_json(path: Path) -> Any:
    """Return a file's value, None if there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def replace_json(path: Path, value: Any) -> None:
    """Replace a file atomically."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value))
    fresh.rename(path)


def create(base: Path, request: Any, facts: dict[str, Any]) -> Path:
    """Make the directory of a new sandbox or container; it counts once facts.json is there."""
    directory = base / (uuid.uuid4().hex * 2)
    directory.mkdir()
    (directory / "request.pb").write_bytes(request.SerializeToString())
    replace_json(directory / "facts.json", facts)
    return directory


def load(base: Path) -> list[Path]:
    """Return the directories of all that was created, and remove those whose creation was cut short."""
    base.mkdir(parents=True, exist_ok=True)
    whole = []
    for directory in base.iterdir():
        if (directory / "facts.json").exists():
            whole.append(directory)
        else:
            shutil.rmtree(directory)
    return whole


def matches(labels: Any, selector: Any) -> bool:
    """Whether labels have all that a selector asks for."""
    return all(labels.get(k) == v for k, v in selector.items())


class Sandbox:
    """A pod's sandbox: an address, no process."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.id = directory.name
        self.request = pb.RunPodSandboxRequest.FromString((directory / "request.pb").read_bytes())
        self.config = self.request.config
        self.facts: dict[str, Any] = read_json(directory / "facts.json")

    def stop(self) -> None:
        """Record that it is not ready any more."""
        self.facts["ready"] = False
        replace_json(self.dir / "facts.json", self.facts)

    @property
    def options(self) -> Any:
        """Its namespaces."""
        return self.config.linux.security_context.namespace_options

    @property
    def host_network(self) -> bool:
        """Whether the pod has the node's address."""
        return bool(self.options.network == pb.NODE)


class Container:
    """A container; what became of it is in the files that the shim leaves."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.id = directory.name
        self.request = pb.CreateContainerRequest.FromString((directory / "request.pb").read_bytes())
        self.config = self.request.config
        self.sandbox_id: str = self.request.pod_sandbox_id
        self.created_at: int = read_json(directory / "facts.json")["created_at"]
        self.spec: dict[str, Any] = read_json(directory / "spec.json")
        self.started: dict[str, int] | None = None
        self.exit: dict[str, Any] | None = None

    def refresh(self) -> Container:
        """Read what has become of it."""
        self.exit = self.exit or read_json(self.dir / "exit.json")
        self.started = self.started or read_json(self.dir / "started.json")
        if self.exit is None and self.shim is not None and not self.shim.alive():
            # Killed together with its shim: the node lost its power.
            self.exit = read_json(self.dir / "exit.json") or {
                "code": 137,
                "at": time.time_ns(),
                "reason": "Error",
                "message": "the container was killed together with its shim",
            }
            replace_json(self.dir / "exit.json", self.exit)
        return self

    @property
    def process(self) -> Process | None:
        """Its first process."""
        return None if self.started is None else Process(self.started["pid"], self.started["pid_ticks"])

    @property
    def shim(self) -> Process | None:
        """The process that keeps it and writes its log."""
        return None if self.started is None else Process(self.started["shim"], self.started["shim_ticks"])

    @property
    def state(self) -> Any:
        """Its state as of the last `refresh`."""
        if self.exit is not None:
            return pb.CONTAINER_EXITED
        return pb.CONTAINER_CREATED if self.started is None else pb.CONTAINER_RUNNING

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return bool(self.refresh().state == pb.CONTAINER_RUNNING)

    def kill(self, number: int) -> None:
        """Signal the first process; its death takes the others along."""
        if self.process is not None:
            self.process.kill(number)

    def usage(self) -> tuple[int, int]:
        """Return the CPU time in nanoseconds and the resident bytes of the first process."""
        try:
            assert self.process is not None
            stat = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            return 0, 0
        ticks = sum(map(int, stat[11:15]))
        return ticks * 10**9 // os.sysconf("SC_CLK_TCK"), int(stat[21]) * os.sysconf("SC_PAGE_SIZE")
