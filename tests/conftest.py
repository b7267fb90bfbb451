"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let a terminated run tear its fixtures down as an interrupted one does: no cluster may outlive it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
