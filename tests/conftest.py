"""What holds for all tests."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from types import FrameType

import pytest

TESTS = Path(__file__).parent
LONGEST = "e2e"
SEED = "EVERLOOP_TEST_SEED"


def pytest_configure(config: pytest.Config) -> None:
    """Let a terminated run tear its fixtures down as an interrupted one does: no cluster may outlive it."""
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(2**32)))  # workers inherit it
    shared_out = config.getoption("numprocesses", 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt_workers if shared_out else signal.default_int_handler)


def pytest_report_header() -> str:
    """How to run this again."""
    return f"{SEED}={os.environ[SEED]}"


@pytest.fixture(scope="session")
def seed() -> int:
    """What this run draws from at random; `EVERLOOP_TEST_SEED` repeats one."""
    return int(os.environ[SEED])


@pytest.hookimpl(tryfirst=True)  # before the names of the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A directory shares its cluster or control plane, so one worker runs it whole; the longest begins."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_area(item)))
    items.sort(key=lambda item: _area(item) != LONGEST)


def _area(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def _interrupt_workers(_signal: int, _frame: FrameType | None) -> None:
    """As Ctrl-C at a terminal does; asked to end in any other way, they are killed before they could clean up."""
    me = os.getpid()
    for worker in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        os.kill(int(worker), signal.SIGINT)
    raise KeyboardInterrupt
