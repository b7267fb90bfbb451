"""A session pod's server that stops itself (SIGSTOP) at one operation on its storage, as a frozen machine would.

All is as in a pod, but for the engine, which is the fake one, and the fence, which is read without need only every
`FENCE_INTERVAL` seconds. The file that `STOP_AT` names says where to stop, once it is there: a moment and a pattern.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import IO, Any
from unittest import mock

from everloop_trainer import wiring
from everloop_trainer.durable import write_file
from everloop_trainer.session.service import SessionConfig
from everloop_trainer.store.files import AppendFile, PosixFiles
from tests.session.fake_engine import FakeSource

STOP_AT = Path(os.environ["STOP_AT"])


def reach(moment: str, path: str) -> None:
    """Stop here, once, if this is where."""
    try:
        wanted, pattern = STOP_AT.read_text().split()
    except FileNotFoundError:
        return
    if moment == wanted and re.search(pattern, path):
        STOP_AT.unlink()
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no step further


class StoppingFiles(PosixFiles):
    """Moments: `flushed`; the fence was read by `journal` or `other`; before a `body`, a `create`, a `delete`."""

    dead = False

    def kill(self) -> None:
        raise AssertionError("this process is killed from outside")

    def hangs(self, path: str) -> bool:
        return False

    def write_state(self, path: str, data: bytes) -> None:
        write_file(Path(path), [data], 0o600)

    def create(self, path: str, data: bytes) -> None:
        reach("create", path)
        super().create(path, data)

    def delete(self, path: str) -> None:
        reach("delete", path)
        super().delete(path)

    def open_append(self, path: str) -> AppendFile:
        return StoppingAppend(super().open_append(path), path)

    def open_read(self, path: str) -> IO[bytes]:
        reach("body", path)
        return super().open_read(path)

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        reach("journal" if threading.current_thread().name.startswith("journal") else "other", path)
        return found


class StoppingAppend:
    """The journal file of a StoppingFiles."""

    def __init__(self, file: AppendFile, path: str) -> None:
        self._file = file
        self._path = path
        self.append = file.append
        self.close = file.close

    def flush(self) -> None:
        """Stops after the flush and before the fence is read."""
        self._file.flush()
        reach("flushed", self._path)


def main() -> int:
    """The server process; returns its exit code."""
    files: list[StoppingFiles] = []

    def open_files(root: Path) -> StoppingFiles:
        files.append(StoppingFiles(root))
        return files[-1]

    def config(**given: Any) -> SessionConfig:
        interval = float(os.environ["FENCE_INTERVAL"])
        return SessionConfig(**given | {"fence_interval": interval, "replay_budget": 0.0})

    with mock.patch.multiple(
        wiring, PosixFiles=open_files, SessionConfig=config, SpareSocket=lambda *_: FakeSource(files[-1])
    ):
        return wiring.run_server()


if __name__ == "__main__":
    sys.exit(main())
