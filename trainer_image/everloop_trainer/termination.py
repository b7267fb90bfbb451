"""Says why a container ends, where its kubelet finds it."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

TERMINATION_LOG = "/dev/termination-log"
"""Made by the kubelet for each container; `EVERLOOP_TERMINATION_LOG` names another file."""
log = structlog.get_logger(__name__)


def give_up(code: int, message: str) -> int:
    """Says in the log and in the container's termination message why it ends with this exit code, which is returned."""
    log.error("giving up", exit_code=code, reason=message)
    try:
        with Path(os.environ.get("EVERLOOP_TERMINATION_LOG", TERMINATION_LOG)).open("r+") as file:
            file.truncate()
            file.write(message)
    except OSError as error:
        log.warning("no termination message", error=str(error))
    return code
