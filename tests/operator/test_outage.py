"""The API server is away for a while: the same operator process waits for it, and makes up for what it missed."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operator.conftest import OPERATOR_TOKEN
from tests.operator.control_plane import ControlPlane
from tests.operator.world import Operator, World, eventually, free_address

pytestmark = pytest.mark.slow


class Line:
    """The network between operator and API server: a port that can be closed, with all its connections."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition("//")[2].partition(":")
        self._target = (host, int(port))
        self._listener: socket.socket | None = None
        self._ends: list[socket.socket] = []
        self._dark: set[socket.socket] = set()
        self.address = ("127.0.0.1", self.open(("127.0.0.1", 0)))

    def open(self, address: tuple[str, int] | None = None) -> int:
        listener = self._listener = socket.create_server(address or self.address)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def cut(self) -> None:
        if self._listener is None:
            return
        # A listener that is only closed goes on listening while a thread waits in accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        for end in self._ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # ended already

    def darken(self) -> None:
        """What is sent on connections that there are arrives nowhere any more, and nobody is told; new ones work."""
        self._dark.update(self._ends)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near = listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with source:
            try:
                while data := source.recv(65536):
                    if source not in self._dark:
                        sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # cut


@pytest.fixture
def line(plane: ControlPlane) -> Iterator[Line]:
    line = Line(plane.server)
    yield line
    line.cut()


@pytest.fixture
def remote(world: World, operator: Operator, plane: ControlPlane, line: Line, tmp_path: Path) -> Iterator[Operator]:
    """An operator at the end of the line, not started yet, in the place of the one of the other tests."""
    operator.stop(signal.SIGKILL)
    away = ControlPlane(f"https://127.0.0.1:{line.address[1]}", plane.ca_file, plane.kube, tmp_path)
    remote = Operator(away.write_kubeconfig(tmp_path / "kubeconfig", OPERATOR_TOKEN), tmp_path / "log", free_address(2))
    yield remote
    remote.stop(signal.SIGKILL)
    operator.start()


def test_starts_once_the_api_server_is_there(world: World, remote: Operator, line: Line) -> None:
    """A process that ended instead would wait for the kubelet's back-off, up to five minutes after the outage."""
    line.cut()
    remote.launch()
    eventually("it has noticed", lambda: "waiting for the API server" in remote.log.read_text())
    line.open()
    eventually("operator alive", remote.alive, 30)
    world.claims()
    world.create_session()
    world.wait_pod("tuned-a1-0")


def test_ends_when_told_to_while_it_waits(remote: Operator, line: Line) -> None:
    """SIGTERM is heard before anything works."""
    line.cut()
    remote.launch()
    eventually("it has noticed", lambda: "waiting for the API server" in remote.log.read_text())
    assert remote.stop() == 0
    line.open()


def test_outage_while_a_node_is_lost(world: World, remote: Operator, line: Line) -> None:
    """What happened in the outage is acted upon within seconds after it, by the same process."""
    remote.start()
    world.claims()
    first, second = world.node("a"), world.node("b")
    world.create_session()
    world.run_pod("tuned-a1-0", first)
    world.wait_phase("Running")
    line.cut()
    world.set_ready(first, "Unknown")
    eventually("the watch has noticed", lambda: "will retry" in remote.log.read_text())
    assert remote.alive()
    line.open()
    world.run_pod("tuned-a2-0", second)
    status = world.wait_phase("Running")
    assert [(entry["reason"], entry["node"]) for entry in status["recoveries"]] == [("NodeLost", first)]
    assert remote.alive()


IMPATIENT = """
import sys
from everloop_operator.cluster import kube, watch
plain, kube.REQUEST_SECONDS = watch.settings, 2.0
def settings():
    values = plain()
    values.watching.inactivity_timeout = 2.0
    return values
watch.settings = settings
from everloop_operator.__main__ import main
sys.exit(main())
"""
"""The operator with limits on silence that a test can wait for."""


def test_connections_that_die_in_silence_are_noticed(world: World, remote: Operator, line: Line) -> None:
    """No reset, no end of file, no answer: what happens after that is handled on new connections."""
    remote.program = ("-c", IMPATIENT)
    remote.start()
    world.claims()
    world.create_session("before")
    world.wait_pod("before-a1-0")
    line.darken()
    world.create_session()
    eventually("the pod", lambda: world.pod("tuned-a1-0"), 30)
    assert remote.alive()
