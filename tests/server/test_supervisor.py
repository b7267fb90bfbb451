"""The supervisor with real processes in the place of server and spare."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everloop_trainer import exitcodes
from everloop_trainer.supervisor import FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS, restart_delay
from tests.server.pod import REPOSITORY, alive, children, eventually, kill_process

CHILD = """
import os, signal, sys, time
name, log, mode = sys.argv[1:4]
def say(word):
    with open(log, "a") as file:
        file.write(f"{name} {word} {os.getpid()}\\n")
def stop(*_):
    time.sleep(0.2 if name == "server" else 0)
    say("stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if mode == "engine" and os.fork() == 0:
    os.setsid()
    name = "engine"
say("started")
if mode.isdecimal():
    sys.exit(int(mode))
while True:
    time.sleep(60)
"""
SUPERVISOR = """
import json, sys
from everloop_trainer.supervisor import Supervisor
server, spare = json.loads(sys.argv[1])
sys.exit(Supervisor(server=server, spare=spare).run())
"""


class Tree:
    """A supervisor over two scripted children that write what happens to them into a file."""

    def __init__(self, directory: Path, server: str = "stay", spare: str = "stay") -> None:
        self.said_file = directory / "said"
        self.said_file.touch()
        commands = [
            [sys.executable, "-c", CHILD, name, str(self.said_file), mode]
            for name, mode in (("server", server), ("spare", spare))
        ]
        self.output = (directory / "out").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, json.dumps(commands)],
            env={"PYTHONPATH": str(REPOSITORY / "trainer_image")},
            stdout=self.output,
        )

    def said(self, start: str) -> list[int]:
        """Process ids of the lines that begin with `start`, in order."""
        lines = self.said_file.read_text().splitlines()
        return [int(line.split()[2]) for line in lines if line.startswith(start)]

    def await_said(self, start: str, count: int = 1) -> list[int]:
        return eventually(lambda: found if len(found := self.said(start)) >= count else None, f"{count} x {start}", 20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tree]:
    """A tree that is gone after the test."""
    options: dict[str, Any] = getattr(request, "param", {})
    tree = Tree(tmp_path, **options)
    yield tree
    tree.close()


def test_delays_grow_to_the_longest_and_start_anew_after_a_stable_life() -> None:
    """Restart delays double from 0.1 s to 5 s and are reset by 30 s of life."""
    delays = [0.0]
    for _ in range(9):
        delays.append(restart_delay(delays[-1], lived=1.0))
    assert delays[1:4] == [FIRST_DELAY_SECONDS, 0.2, 0.4]
    assert delays[-1] == LONGEST_DELAY_SECONDS
    assert restart_delay(LONGEST_DELAY_SECONDS, lived=30.0) == FIRST_DELAY_SECONDS


@pytest.mark.parametrize("name", ["server", "spare"])
def test_a_killed_child_is_started_again_and_its_sibling_left_alone(tree: Tree, name: str) -> None:
    """Either child is restarted alone."""
    sibling = "spare" if name == "server" else "server"
    (first,) = tree.await_said(f"{name} started")
    tree.await_said(f"{sibling} started")
    kill_process(first)
    _, second = tree.await_said(f"{name} started", 2)
    assert second != first
    assert len(tree.said(f"{sibling} started")) == 1


def test_sigterm_ends_the_server_before_the_spare(tree: Tree) -> None:
    """The server drains while the spare still runs, and the supervisor ends with its code."""
    tree.await_said("server started")
    tree.await_said("spare started")
    tree.process.terminate()
    assert tree.process.wait(timeout=10) == 0
    stopped = [line.split()[0] for line in tree.said_file.read_text().splitlines() if "stopped" in line]
    assert stopped == ["server", "spare"]


@pytest.mark.parametrize(
    ("tree", "code"),
    [({"server": str(code)}, code) for code in sorted(exitcodes.FINAL)],
    indirect=["tree"],
)
def test_a_final_code_of_the_server_ends_the_container(tree: Tree, code: int) -> None:
    """Fenced, storage mismatch and bad configuration are not retried inside the container."""
    assert tree.process.wait(timeout=20) == code
    assert len(tree.said("server started")) == 1


@pytest.mark.parametrize("tree", [{"server": str(exitcodes.STORAGE_FAILED)}], indirect=True)
def test_failed_storage_is_retried_by_a_new_server(tree: Tree) -> None:
    """Exit code 66 restarts the server like any death."""
    assert len(set(tree.await_said("server started", 3))) == 3
    assert tree.process.poll() is None


@pytest.mark.parametrize("tree", [{"spare": str(exitcodes.ACCELERATOR_FAILED)}], indirect=True)
def test_a_broken_accelerator_ends_the_container(tree: Tree) -> None:
    """The spare passes on how its engine ended; the server is told to stop, and no other spare is started."""
    assert tree.process.wait(20) == exitcodes.ACCELERATOR_FAILED
    assert len(tree.said("spare started")) == 1


@pytest.mark.parametrize("tree", [{"spare": "engine"}], indirect=True)
def test_an_engine_outlives_its_spare_and_is_reaped(tree: Tree) -> None:
    """An orphaned engine is adopted by the supervisor, goes on, and leaves no zombie when it ends."""
    (engine,) = tree.await_said("engine started")
    (spare,) = tree.await_said("spare started")
    kill_process(spare)
    tree.await_said("spare started", 2)
    assert alive(engine)
    eventually(lambda: engine in children(tree.process.pid), "the engine was adopted", 5)
    kill_process(engine)
    kill_process(tree.await_said("engine started", 2)[-1])
    eventually(lambda: not Path(f"/proc/{engine}").exists(), "the engine was reaped", 5)


def test_nothing_outlives_the_supervisor(tree: Tree) -> None:
    """Server and spare die with a killed supervisor even where it is not process 1."""
    (server,) = tree.await_said("server started")
    (spare,) = tree.await_said("spare started")
    kill_process(tree.process.pid)
    eventually(lambda: not alive(server) and not alive(spare), "the children ended", 5)


def test_the_supervisor_stands_on_the_standard_library() -> None:
    """Process 1 imports nothing that an installation could break."""
    code = "import sys, everloop_trainer.supervisor; print(*sys.modules)"
    modules = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(REPOSITORY / 'trainer_image')!r}); {code}",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    outside = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"__main__"}
    assert outside == {"everloop_trainer"}
