"""The progress reader: `python -m everloop_progress`, told by its environment what to read."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from everloop_operator.api import names

from .history import Point
from .reader import Reader, Task
from .server import Server

LAST_READING_SECONDS = 5.0


def task_of(environment: Mapping[str, str]) -> Task:
    """What is to be read. Raises KeyError and ValueError."""
    return Task(
        job=Path(environment["EVERLOOP_JOB_DIR"]),
        attempt=int(environment["EVERLOOP_ATTEMPT"]),
        given=Point(int(environment["EVERLOOP_RESUME_ITERATION"]), environment.get("EVERLOOP_RESUME_FROM", "")),
        start=environment.get("EVERLOOP_START_FROM", ""),
    )


def main() -> int:
    """Serve until asked to end, and leave the last report as the message of the end."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    reader = Reader(task_of(os.environ))
    token = Path(os.environ["EVERLOOP_TOKEN_FILE"]).read_text().strip()
    server = Server(os.environ["POD_IP"], names.PROGRESS_PORT, reader, token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # The last reading may hang with the storage: then what was known before is said.
    stop.wait()
    where = Path(os.environ["EVERLOOP_LAST_WORDS"])
    last = threading.Thread(target=_say_last_words, args=(reader, where), daemon=True)
    last.start()
    last.join(LAST_READING_SECONDS)
    return 0


def _say_last_words(reader: Reader, where: Path) -> None:
    where.write_text(json.dumps(reader.last_words()))


if __name__ == "__main__":
    sys.exit(main())
