"""What holds for all tests."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from types import FrameType

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LONGEST = "e2e"
APART = ("test_life_cycle.py", "test_random_kills.py", "test_rl_job.py")
"""About half of the end-to-end tests, so that two workers may have a cluster each."""
SEED = "EVERLOOP_TEST_SEED"


def pytest_configure(config: pytest.Config) -> None:
    """Let a terminated run tear its fixtures down as an interrupted one does: no cluster may outlive it."""
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(2**32)))  # workers inherit it
    shared_out = config.getoption("numprocesses", 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt_workers if shared_out else _interrupt_once)


def pytest_report_header() -> str:
    """How to run this again."""
    return f"{SEED}={os.environ[SEED]}"


@pytest.fixture(scope="session")
def seed() -> int:
    """What this run draws from at random; `EVERLOOP_TEST_SEED` repeats one."""
    return int(os.environ[SEED])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest begin."""
    items.sort(key=lambda item: not _area(item.nodeid).startswith(LONGEST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """A directory shares its cluster or its control plane, so one worker runs it, or half of the longest."""
    return ByArea(config, log)


class ByArea(LoadScopeScheduling):  # type: ignore[misc]  # the library has no types
    """Deals out the directories of tests/."""

    def _split_scope(self, nodeid: str) -> str:
        return _area(nodeid)


def _area(nodeid: str) -> str:
    area, name = nodeid.split("::")[0].split("/")[1:3]
    return f"{area}, apart" if area == LONGEST and name in APART else area


def _interrupt_once(_signal: int, _frame: FrameType | None) -> None:
    """What comes after that would break off the taking down: a worker is told twice to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _interrupt_workers(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C at a terminal does; asked to end in any other way, they are killed before they could clean up."""
    me = os.getpid()
    for worker in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        os.kill(int(worker), signal.SIGINT)
    _interrupt_once(number, frame)
