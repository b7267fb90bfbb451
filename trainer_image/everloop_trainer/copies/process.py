"""The processes that speak to S3, so that the server never does: the copier, and the restorer before it.

The copier reads what is wanted from its standard input and writes its reports to its standard output. It ends with its
server: at the end of its input.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import structlog

from everloop_trainer import exitcodes
from everloop_trainer.config import ConfigError, CopiesConfig, TrainerConfig, read_config
from everloop_trainer.copies.bucket import Bucket, CopyFailed, Place
from everloop_trainer.copies.copier import Copier
from everloop_trainer.copies.protocol import REPORT, WANTED, Wanted
from everloop_trainer.copies.restore import restore
from everloop_trainer.copies.working import Working
from everloop_trainer.logs import configure_logs
from everloop_trainer.session.errors import Fenced
from everloop_trainer.session.status import CopiesReport
from everloop_trainer.store.files import PosixFiles

NICENESS = 10
"""Training goes first."""
log = structlog.get_logger(__name__)


class Inbox:
    """The newest message, whatever came before it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._latest = Wanted()

    def put(self, wanted: Wanted) -> None:
        """A message has come."""
        with self._changed:
            self._latest = wanted
            self._changed.notify_all()

    def get(self) -> Wanted:
        """The newest one."""
        with self._changed:
            return self._latest

    def wait(self, known: Wanted, seconds: float) -> None:
        """Until there is another one than `known`, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest is not known, seconds)


def run_copier(number: int) -> int:
    """Copies for incarnation `number` until the input ends; returns the exit code."""
    config, copies = _start("copies")
    os.nice(NICENESS)
    inbox = Inbox()
    threading.Thread(target=_listen, args=(inbox,), daemon=True, name="input").start()
    files = PosixFiles(Path(config.session.storage.root))
    try:
        bucket = _bucket(config, copies)
        working = Working(Copier(files, bucket, number, copies.snapshot_seconds, time.monotonic), _tell)
        while True:
            wanted = inbox.get()
            seconds = working.step(wanted)
            if seconds:
                inbox.wait(wanted, seconds)
    except Fenced as error:
        log.warning("copies are another one's now", reason=str(error))
        return exitcodes.FENCED
    except CopyFailed as error:
        _tell(CopiesReport(error=str(error)))
        return exitcodes.BAD_CONFIGURATION


def run_restore() -> int:
    """Fills an empty storage from the copies, if there are any; says on standard output why it could not."""
    config, copies = _start("restore")
    try:
        restore(PosixFiles(Path(config.session.storage.root)), _bucket(config, copies))
    except (CopyFailed, OSError) as error:
        sys.stdout.write(f"{error}\n")
        return exitcodes.STORAGE_FAILED
    return 0


def _start(component: str) -> tuple[TrainerConfig, CopiesConfig]:
    config = read_config()
    session = config.session
    configure_logs(component, stream=sys.stderr, session=f"{session.namespace}/{session.name}", pod=config.pod_name)
    if session.copies is None:
        raise ConfigError("EVERLOOP_CONFIG: copies: Field required")
    return config, session.copies


def _bucket(config: TrainerConfig, copies: CopiesConfig) -> Bucket:
    s3, session = copies.s3, config.session
    place = Place(s3.uri, s3.region, s3.endpoint_url, s3.kms_key_id, s3.credentials_dir)
    return Bucket(place, f"{session.namespace}/{session.name}")


def _listen(inbox: Inbox) -> None:
    for line in sys.stdin.buffer:
        inbox.put(WANTED.validate_json(line))
    os._exit(0)  # in the middle of whatever: nobody is left to tell of it


def _tell(report: CopiesReport) -> None:
    sys.stdout.buffer.write(REPORT.dump_json(report) + b"\n")
    sys.stdout.buffer.flush()
