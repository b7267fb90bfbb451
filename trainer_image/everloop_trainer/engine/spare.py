"""The spare: a process that has torch imported and the base model loaded, from which engines are forked.

Importing and loading take seconds to minutes, a fork milliseconds, and the weights are shared copy-on-write. The spare
stays single-threaded, because a started pool of OpenMP threads does not survive a fork; each engine sets its own
number of threads. Engines are sessions of their own: they outlive the spare, and end with their connection.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.exitcodes import ACCELERATOR_FAILED

if TYPE_CHECKING:
    from everloop_trainer.engine.base import BaseModel

EXIT_DEFECT = 70

_log = logging.getLogger(__name__)

# Read by the libraries while they are imported: nobody starts a thread, nobody looks for a network, and OpenMP threads
# that wait give their core away (spinning, one step took 20 times as long on a busy machine).
_ENVIRONMENT: Mapping[str, str] = {
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_spare(config: SpareConfig) -> int:
    """Load the base model, listen on `config.socket`, and fork an engine for each connection, until SIGTERM.

    Call it in a process that has not imported torch or numpy. Returns the exit status: 0, or that of an engine whose
    accelerator failed.

    Raises:
        ValueError: the base model is not supported.
        OSError: the base model cannot be read, or the socket cannot be bound.
        RuntimeError: some library started a thread.
    """
    os.environ.update(_ENVIRONMENT)
    started = time.monotonic()
    base = _load(config)
    threads = _thread_count()
    if threads != 1:
        raise RuntimeError(f"the spare has {threads} threads, so that its forks would not be sound")
    gc.collect()
    gc.freeze()
    _log.info("base model %s loaded in %.1f s", base.name, time.monotonic() - started)
    return _Spare(config, base).serve()


def _load(config: SpareConfig) -> BaseModel:
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()

    from everloop_trainer.engine import worker  # noqa: F401  imported here so that forks find it ready
    from everloop_trainer.engine.base import load_base

    return load_base(config)


def _thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


class _Spare:
    """Accepts connections and reaps engines."""

    def __init__(self, config: SpareConfig, base: BaseModel) -> None:
        self._config = config
        self._base = base
        self._listener = _listen(config.socket)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> int:
        """Run until SIGTERM or SIGINT, or until an engine has found its accelerator broken; the exit status."""
        terminated = False
        status = 0

        def terminate(_signal: int, _frame: object) -> None:
            nonlocal terminated
            terminated = True

        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, terminate)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        _log.info("spare listens on %s", self._config.socket)
        while not terminated and status == 0:
            ready, _, _ = select.select([self._listener.fileno(), self._wake_read], [], [])
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                status = _reap()
            if self._listener.fileno() in ready and not terminated:
                connection, _ = self._listener.accept()
                self._fork(connection)
        self._listener.close()
        self._config.socket.unlink(missing_ok=True)
        gc.unfreeze()
        _log.info("spare ends")
        return status

    def _fork(self, connection: socket.socket) -> None:
        pid = os.fork()
        if pid:
            connection.close()
            _log.info("engine %d starts", pid)
            return
        status = EXIT_DEFECT
        try:
            self._become_engine()
            status = _run_engine(connection, self._base, self._config)
        finally:
            os._exit(status)

    def _become_engine(self) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._listener.close()


def _run_engine(connection: socket.socket, base: BaseModel, config: SpareConfig) -> int:
    import torch

    from everloop_trainer.engine.worker import Worker

    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    # Memory that is written before it is read needs no filling.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    connection.setblocking(True)
    return Worker(connection, base, config).run()


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen()
    return listener


def _reap() -> int:
    """Collect every child that has ended, and say how; returns ACCELERATOR_FAILED if one ended with it, else 0."""
    found = 0
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            _log.warning("engine %d was killed by %s", pid, signal.Signals(-code).name)
        else:
            _log.info("engine %d ended with status %d", pid, code)
        if code == ACCELERATOR_FAILED:
            found = code
