"""What a running pod was told to change. It is kept in the pod's own directory, for the server that comes next there.

A later pod finds it in its configuration. So a kill of any process must not lose it, while a machine that stops may:
whoever told it looks at what the server reports, and tells it again.
"""

from __future__ import annotations

import json
from pathlib import Path

import structlog
from pydantic import ValidationError

from everloop_trainer.config import CheckpointsConfig, Settings
from everloop_trainer.session.status import AutomaticCheckpoints

log = structlog.get_logger(__name__)


class Adjusted:
    """The settings of one pod, kept in `file`."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def checkpoints(self, configured: CheckpointsConfig) -> AutomaticCheckpoints:
        """How automatic checkpoints are taken: as was told last, else as configured. Raises OSError."""
        return automatic(self._read() or configured)

    def _read(self) -> CheckpointsConfig | None:
        try:
            return Settings.model_validate_json(self._file.read_bytes()).checkpoints
        except FileNotFoundError:
            return None
        except ValidationError as error:
            log.warning("what this pod was told to change is damaged, and left out", error=error.errors()[0]["msg"])
            return None

    def remember(self, checkpoints: AutomaticCheckpoints) -> None:
        """Keep it. Raises OSError; then what was kept before is there still."""
        kept = {"checkpoints": {"everySeconds": checkpoints.every, "keepLast": checkpoints.keep}}
        written = self._file.with_suffix(".new")
        written.write_text(json.dumps(kept))
        written.rename(self._file)


def automatic(config: CheckpointsConfig) -> AutomaticCheckpoints:
    """The same as the session knows it."""
    return AutomaticCheckpoints(config.every_seconds, config.keep_last)
