"""Keeps the processes of a cluster as its settings say: starts what is missing and again what died.

``python -m devcluster supervise ROOT`` runs in a mount namespace of the cluster's own, in which ROOT is a shared mount:
that way the mounts that a kubelet makes there (secrets, subPaths) are seen by the container runtimes. The namespace
and all its mounts go when the last process in it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from socket import AF_UNIX, socket

from devcluster.api import ApiClient, ApiError
from devcluster.components import Component, components
from devcluster.processes import ROOT_VARIABLE, Process, start_ticks
from devcluster.settings import Layout, Settings
from devcluster.shim.linux import adopt_orphans

TICK_SECONDS = 0.1
STABLE_SECONDS = 10.0
MAX_BACKOFF_SECONDS = 2.0

NAMESPACE = """
mount --make-rprivate / && mount --bind "$1" "$1" && mount --make-shared "$1" && root=$1 && shift && exec "$@"
"""


@dataclass(slots=True)
class _Attempt:
    """When a component was last started, and how often in a row it died young."""

    at: float
    failures: int


class Supervisor:
    """One cluster's."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._attempts: dict[str, _Attempt] = {}
        self._api_ready = False

    def run(self) -> None:
        """Work until the cluster is stopping and no process of it is left."""
        adopt_orphans()  # containers, whose shims leave their parent, so that all that ends is reaped
        while True:
            children_left = _reap()
            with self._layout.locked():
                settings = self._layout.read()
                if settings.stopping and not children_left:
                    return
                for component in components(self._layout, settings):
                    self._keep(component, settings)
            time.sleep(TICK_SECONDS)

    def _keep(self, component: Component, settings: Settings) -> None:
        name, now = component.name, time.monotonic()
        if Process.load(self._layout.pids / name) is not None:
            return
        last = self._attempts.get(name)
        failures = last.failures + 1 if last and now - last.at < STABLE_SECONDS else 0
        if last and failures and now - last.at < min(MAX_BACKOFF_SECONDS, 0.1 * 2**failures):
            return
        if component.needs_api and not self._is_api_ready():
            return
        if component.needs_socket and not _answers(component.needs_socket):
            return
        self._start(component, settings)
        self._attempts[name] = _Attempt(now, failures)

    def _start(self, component: Component, settings: Settings) -> None:
        package = str(Path(__file__).resolve().parents[1])
        environment = {**os.environ, ROOT_VARIABLE: str(self._layout.root), **component.environment}
        environment["PYTHONPATH"] = ":".join(filter(None, [package, component.environment.get("PYTHONPATH")]))
        with (self._layout.logs / component.name).open("ab") as log:
            process = subprocess.Popen(
                component.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd=self._layout.root, env=environment,
            )  # fmt: skip
        Process(process.pid, start_ticks(process.pid) or 0).save(self._layout.pids / component.name)
        print(f"started {component.name} as {process.pid}", flush=True)
        process.returncode = 0  # _reap collects it; subprocess need not

    def _is_api_ready(self) -> bool:
        """Whether the API server was ready once; afterwards everybody waits for it themselves."""
        if not self._api_ready:
            try:
                self._api_ready = ApiClient(self._layout.kubeconfig).get("/readyz") == "ok"
            except (OSError, HTTPException, ApiError):
                pass
        return self._api_ready


def start(layout: Layout) -> subprocess.Popen[bytes]:
    """Start the supervisor of a cluster in the background and return it."""
    package = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, ROOT_VARIABLE: str(layout.root), "PYTHONPATH": package}
    command = [sys.executable, "-m", "devcluster", "supervise", str(layout.root)]
    with (layout.logs / "supervisor").open("ab") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", NAMESPACE, "sh", str(layout.root), *command], cwd=layout.root,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment,
        )  # fmt: skip
    Process(process.pid, start_ticks(process.pid) or 0).save(layout.pids / "supervisor")
    return process


def _reap() -> bool:
    """Collect children that have ended; returns whether any are left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _answers(path: Path) -> bool:
    """Whether somebody listens on a socket; its file alone proves nothing."""
    with socket(AF_UNIX) as s:
        try:
            s.connect(str(path))
        except OSError:
            return False
    return True
