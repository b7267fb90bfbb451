"""The server's side of the copies: starts the processes that speak to S3, and never waits for what they do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import structlog
from pydantic import ValidationError

from everloop_trainer import exitcodes
from everloop_trainer.copies.protocol import REPORT, WANTED, SharedFile, State, Wanted
from everloop_trainer.session.errors import StorageFailed
from everloop_trainer.session.identifiers import storage_id
from everloop_trainer.session.ports import StateRef
from everloop_trainer.session.status import CopiesReport
from everloop_trainer.store import layout

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
log = structlog.get_logger(__name__)


class CopierProcess:
    """session.ports.Copies for one incarnation. A copier that ends is started again, after a growing delay."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._wanted = Wanted()
        self._report = CopiesReport()
        self._process: asyncio.subprocess.Process | None = None
        self._finished = asyncio.Event()

    @property
    def report(self) -> CopiesReport:
        """See session.ports.Copies."""
        return self._report

    def want(self, states: Sequence[StateRef], models: Collection[str]) -> None:
        """See session.ports.Copies."""
        wanted = _wanted(states, models, last=False)
        if wanted != self._wanted and not self._wanted.last:
            self._wanted = wanted
            self._send()

    async def finish(self, states: Sequence[StateRef], models: Collection[str]) -> None:
        """See session.ports.Copies."""
        self._wanted = _wanted(states, models, last=True)
        self._send()
        await self._finished.wait()

    async def run(self) -> None:
        """See session.ports.Copies."""
        delay = FIRST_DELAY
        while True:
            began = asyncio.get_running_loop().time()
            code = await self._serve()
            if code == exitcodes.FENCED or (code == exitcodes.BAD_CONFIGURATION and self._wanted.last):
                self._finished.set()
            if code == exitcodes.FENCED:
                error = "another incarnation makes the copies"
                self._report = CopiesReport(self._report.pending, self._report.last_time, error)
                await (
                    asyncio.Event().wait()
                )  # the server finds the same fence, unless its storage is older than the copies
            if asyncio.get_running_loop().time() - began > LONGEST_DELAY:
                delay = FIRST_DELAY
            log.warning("the copier ended: it is started again", exit_code=code, seconds=delay)
            error = self._report.error or f"the copier ended with exit code {code}"
            self._report = CopiesReport(self._report.pending, self._report.last_time, error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    async def _serve(self) -> int:
        process = await _start("copies", str(self._number))
        self._process = process
        try:
            self._send()
            assert process.stdout is not None, "it is a pipe"
            async for line in process.stdout:
                try:
                    self._report = REPORT.validate_json(line)
                    if self._report.finished:
                        self._finished.set()
                except ValidationError as error:
                    log.error("the copier said something else than a report", error=error.errors()[0]["msg"])
            return await process.wait()
        finally:
            self._process = None
            await _end(process)

    def _send(self) -> None:
        """Without waiting: a pipe takes it, or the copier is about to end, and the next one gets all of it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(WANTED.dump_json(self._wanted) + b"\n")


def _wanted(states: Sequence[StateRef], models: Collection[str], *, last: bool) -> Wanted:
    named = tuple(State(each.kind, storage_id(each.model), each.key, _shared(each)) for each in states)
    return Wanted(named, tuple(sorted(storage_id(model) for model in models)), last)


def _shared(state: StateRef) -> SharedFile | None:
    shared = state.shared
    return None if shared is None else SharedFile(storage_id(shared.holder), state.model, shared.source, shared.time)


async def restore_if_empty(root: Path) -> None:
    """Fills a storage that has no identity from the copies, if there are any.

    Raises:
        StorageFailed: it can't be known whether there are, or they can't be read: to begin anew would be silent loss.
    """
    if await asyncio.to_thread((root / layout.IDENTITY).exists):
        return
    process = await _start("restore")
    try:
        said, _ = await process.communicate()
    finally:
        await _end(process)
    if process.returncode != 0:
        reason = said.decode(errors="replace").strip() or f"exit code {process.returncode}"
        raise StorageFailed(f"the storage is empty, and its copies can not be read: {reason}")


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "everloop_trainer", *arguments]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
