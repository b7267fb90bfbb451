"""A session pod as a tree of processes on a loopback address of its own: started, watched and killed by the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.server import tinymodel

REPOSITORY = Path(__file__).parents[2]
TOKEN = "5e" * 32
T = TypeVar("T")


def eventually(probe: Callable[[], T | None], what: str, seconds: float = 60.0, every: float = 0.01) -> T:
    """The first truthy answer of `probe`; AssertionError naming `what` when there is none in time."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        value = probe()
        if value:
            return value
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s: {what}")


class Pod:
    """One pod; `start` and `kill` of its container keep the pod UID, as a restart in place by the kubelet does."""

    def __init__(
        self, directory: Path, ip: str, model: Path, attempt: int = 1, uid: str = "uid-1", token: str = TOKEN
    ) -> None:
        self.directory = directory
        self.ip = ip
        self.uid = uid
        self.token = token
        self.model = model
        self.root = directory / "volume" / "team" / "tiny"
        self.log = directory / "log"
        self._container: subprocess.Popen[bytes] | None = None
        token_file = directory / "token"
        directory.mkdir(parents=True, exist_ok=True)
        token_file.write_text(token)
        (directory / "termination").touch()
        (directory / "run").mkdir(exist_ok=True)
        config = {
            "format": 1,
            "namespace": "team",
            "name": "tiny",
            "uid": "session-uid",
            "attempt": attempt,
            "baseModel": {"name": tinymodel.NAME, "revision": "r1", "path": str(model)},
            "engine": {"dtype": "Float32", "maxSequenceLength": 256, "threads": 1, "deterministic": True},
            "adapters": {"maxModels": 64, "maxRank": 32},
            "storage": {"root": str(self.root)},
            "snapshots": {"replayBudgetSeconds": 0.2},
            "tokenFile": str(token_file),
        }
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY / "trainer_image"),
            "HF_HUB_OFFLINE": "1",
            "EVERLOOP_CONFIG": json.dumps(config),
            "EVERLOOP_RUN_DIR": str(directory / "run"),
            "EVERLOOP_TERMINATION_LOG": str(directory / "termination"),
            "POD_IP": ip,
            "POD_UID": uid,
            "POD_NAME": "tiny-a1-0",
            "NODE_NAME": "node-1",
        }

    def configure(self, **changes: Any) -> None:
        """Changes top-level fields of EVERLOOP_CONFIG before the next start."""
        config = json.loads(self.environment["EVERLOOP_CONFIG"])
        self.environment["EVERLOOP_CONFIG"] = json.dumps(config | changes)

    def use_storage_of(self, other: Pod) -> None:
        """Makes this a pod of the same session."""
        self.root = other.root
        self.configure(storage={"root": str(other.root)})

    @property
    def url(self) -> str:
        return f"http://{self.ip}:8080"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", "X-Everloop-Pod-UID": self.uid}

    def start(self, role: str = "supervisor") -> None:
        command = [sys.executable, "-m", "everloop_trainer", role]
        with self.log.open("ab") as log:
            self._container = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True, cwd=self.directory
            )

    @property
    def container(self) -> subprocess.Popen[bytes]:
        assert self._container is not None
        return self._container

    def kill(self) -> None:
        """Kills process 1; the rest of the tree has to follow it by itself."""
        tree = list(self.processes())
        self.container.kill()
        self.container.wait()
        eventually(lambda: not any(alive(pid) for pid in tree), "every process of the pod ended", 10)

    def end(self) -> None:
        """Leaves no process behind."""
        if self._container is not None and self._container.poll() is None:
            self.kill()

    def stop(self) -> int:
        """SIGTERM, as the kubelet does; returns the exit code."""
        self.container.terminate()
        return self.container.wait(timeout=60)

    def processes(self) -> Iterator[int]:
        """Process ids below (not including) process 1."""
        yield from _descendants(self.container.pid)

    def child(self, role: str) -> int | None:
        """Process id of `server` or `spare`."""
        for pid in children(self.container.pid):
            if command_line(pid)[-1:] == [role]:
                return pid
        return None

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=5)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=self.headers, timeout=5)

    def request(self, method: str, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        return httpx.request(method, self.url + path, json=body, headers=headers or self.headers, timeout=5)

    def status(self) -> dict[str, Any] | None:
        try:
            answer = self.get("/status")
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def wait_until(self, state: str, seconds: float = 60.0) -> dict[str, Any]:
        def probe() -> dict[str, Any] | None:
            assert self.container.poll() is None, f"the container ended: {self.log.read_text()[-3000:]}"
            status = self.status()
            return status if status is not None and status["state"] == state else None

        return eventually(probe, f"state {state}; log: {self.log}", seconds)

    def journal(self) -> list[dict[str, Any]]:
        """Every record of the history, through the command that people use."""
        dump = subprocess.run(
            [sys.executable, "-m", "everloop_trainer", "journal", str(self.root)],
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return [json.loads(line) for line in dump.stdout.splitlines()]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it goes while it is read
        return False


def command_line(pid: int) -> list[str]:
    """The arguments of a process; none once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def children(pid: int) -> list[int]:
    """Process ids of the children, adopted ones too."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _descendants(child)


def process_of(pod: Pod, role: str) -> int:
    """Process id of the pod's server or spare, waited for while there is none."""
    return eventually(lambda: pod.child(role), f"a {role}")


def kill_process(pid: int) -> None:
    """SIGKILL; never of 0, which would be the tests' own process group."""
    assert pid > 0
    os.kill(pid, signal.SIGKILL)
