"""A recipe's run on a whole stack, with a process of the pod killed at each of three moments."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.bench.stack import Stack, make_pod, serving
from tests.prepared import base_model, environment_python
from tests.recipes import place
from tests.recipes.recorder import Call, Recording, recording
from tests.recipes.table import Recipe
from tests.server.pod import Pod, eventually, kill_process, process_of

LONGEST = 2048
RECIPE_SECONDS = 900.0


@dataclass(frozen=True)
class World:
    """What serves, and what stands before the pod."""

    stack: Stack
    recording: Recording

    @property
    def pod(self) -> Pod:
        return self.stack.pod


@contextlib.contextmanager
def world(directory: Path) -> Iterator[World]:
    """A gateway, a recorder and a pod that serves SmolLM2 under the name of a model that recipes know."""
    recordings: list[Recording] = []
    with contextlib.ExitStack() as stack:

        def front(pod: Pod) -> str:
            recordings.append(stack.enter_context(recording(pod)))
            return recordings[0].ip

        served = stack.enter_context(serving(directory, place.MODEL, address=front))
        yield World(served, recordings[0])


@contextlib.contextmanager
def second_pod(directory: Path) -> Iterator[Pod]:
    """A pod of the same settings, whose storage is empty."""
    pod = make_pod(directory, place.MODEL, base_model(), "5e" * 32, LONGEST)
    pod.start()
    try:
        pod.wait_until("Serving", 120)
        yield pod
    finally:
        pod.end()


class Killer:
    """Kills engine, server and container, one at each moment, in an order drawn by lot."""

    MOMENTS = ("create_model", "forward_backward", "optim_step")
    """After the first submit of this kind was accepted."""

    def __init__(self, pod: Pod, seed: int) -> None:
        victims = [self._kill_engine, self._kill_server, self._kill_container]
        random.Random(seed).shuffle(victims)
        self._pod = pod
        self._left = dict(zip(self.MOMENTS, victims, strict=True))
        # One after the other: two moments may be milliseconds apart, and who is killed must be alive.
        self._kills = ThreadPoolExecutor(1)
        self._done: list[Future[str]] = []

    def accepted(self, call: Call) -> None:
        """Called for each submit."""
        kill = self._left.pop(call.name, None)
        if kill is not None:
            self._done.append(self._kills.submit(kill))

    def join(self) -> list[str]:
        """Who was killed, in this order, once all that was killed has been started again."""
        self._kills.shutdown()
        return [kill.result() for kill in self._done]

    def _kill_engine(self) -> str:
        def pid() -> int | None:
            status = self._pod.status() or {}
            engine = status.get("engine")  # there is none while a server starts
            return engine["pid"] if engine else None

        _kill(lambda: eventually(pid, "an engine"))
        return "engine"

    def _kill_server(self) -> str:
        _kill(lambda: process_of(self._pod, "server"))
        return "server"

    def _kill_container(self) -> str:
        self._pod.kill()
        self._pod.start()
        return "container"


def _kill(find: Callable[[], int]) -> None:
    """Kill whom `find` finds, alive: who had ended by itself was nobody's victim."""

    def killed() -> bool:
        try:
            kill_process(find())
        except ProcessLookupError:
            return False
        return True

    eventually(killed, "somebody to kill")


def run(recipe: Recipe, world: World, directory: Path) -> None:
    """The recipe as its users run it; AssertionError with the end of its output unless it ends well."""
    directory.mkdir()
    place.make(directory, base_model())
    log = directory / "output.log"
    with log.open("wb") as file:
        done = subprocess.run(
            [environment_python("cookbook"), *recipe.command],
            cwd=directory,
            env=place.environment(world.stack.gateway.url, world.stack.key, directory),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=RECIPE_SECONDS,
            check=False,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
