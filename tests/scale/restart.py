"""An operator starts anew over many sessions whose children are there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.operator.conftest import OPERATOR_TOKEN, grant, installed_api
from tests.operator.control_plane import running
from tests.operator.world import Operator, World, eventually, free_address
from tests.scale.audit import AuditLog, Entry
from tests.scale.fleet import Fleet, Trainers, answering, pattern

USER = "everloop-operator"
STILL_SECONDS = 3.0
"""How long no call must come until the operator is taken to have come to rest."""
PATIENCE_SECONDS = 600.0


class Watched(Operator):
    """An operator whose memory can be seen."""

    def mib(self, field: str) -> float:
        """VmRSS now, or VmHWM at most so far."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


@dataclass(frozen=True)
class Stage:
    """A control plane with a fleet, and an operator that may be started."""

    fleet: Fleet
    trainers: Trainers
    operator: Watched
    log: AuditLog
    world: World
    """The session that the others are copies of."""


@dataclass(frozen=True)
class Rest:
    """How an operator came to rest."""

    seconds: float
    """From its first list until its last call."""
    calls: list[Entry]
    """Without watches."""


@contextmanager
def stage(directory: Path, sessions: int, nodes: int) -> Iterator[Stage]:
    """All is there; the operator is not running."""
    (directory / "plane").mkdir()
    with (
        running(directory / "plane", (f"{OPERATOR_TOKEN},{USER},2",), audit=True) as plane,
        installed_api(plane) as api,
    ):
        grant(api)
        kubeconfig = plane.write_kubeconfig(directory / "kubeconfig", OPERATOR_TOKEN)
        operator = Watched(kubeconfig, directory / "operator.log", free_address(4))
        operator.start()
        try:
            world = World(api, "pattern", 250)
            fleet = Fleet(api, plane, directory, pattern(world), sessions, nodes)
            operator.stop()
            fleet.settle()
            with answering(fleet, directory / "trainers.log") as trainers:
                yield Stage(fleet, trainers, operator, AuditLog(plane.audit_log), world)
        finally:
            operator.stop()
            world.close()


def come_to_rest(stage: Stage) -> Rest:
    """Starts the operator and waits until it has asked every pod, and then calls nobody for a while.

    Raises AssertionError if it does not rest in time.
    """
    stage.log.skip()
    stage.operator.launch()
    calls: list[Entry] = []
    last = time.monotonic()

    def still() -> bool:
        nonlocal last
        more = [entry for entry in stage.log.read(USER) if entry.verb != "watch"]
        calls.extend(more)
        if more or stage.trainers.asked() < stage.fleet.sessions:
            last = time.monotonic()
        return time.monotonic() - last > STILL_SECONDS

    eventually("the operator rests", still, PATIENCE_SECONDS)
    began = next(entry.received.timestamp() for entry in calls if entry.verb == "list")
    return Rest(calls[-1].received.timestamp() - began, calls)
