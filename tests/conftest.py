"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let a terminated run tear its fixtures down as an interrupted one does: no cluster may outlive it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
