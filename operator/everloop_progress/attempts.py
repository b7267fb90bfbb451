"""The attempts of a job in storage: what each goes on from, and how much of its predecessor's reports counts.

Below the job's directory attempt 3 has `a3/`, the only place that its driver can write to, and `a3.json`, written by
its progress reader before the driver starts: the attempt before, how many bytes of its files count, and the iteration
after which attempt 3 goes on. Whatever a driver writes that lives on beyond that is never read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from .entries import BadLine, Entry, parse
from .history import History, Point, Sequence
from .tails import Tail, Trouble

PROGRESS = "progress.jsonl"
EVALUATION = "evaluation.jsonl"
FORMAT = 1


class Predecessor(BaseModel):
    """The attempt that was gone on from; of its files so many bytes count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: int
    progress: int
    evaluation: int


class Record(BaseModel):
    """The beginning of an attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    attempt: int
    predecessor: Predecessor | None = None
    iteration: int = 0
    """The iteration after which it goes on."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The storage says that the driver should go on from elsewhere than it was told to."""

    resume: Point


class Files:
    """The two files of one attempt, read into a history."""

    def __init__(self, directory: Path, limits: Predecessor | None = None) -> None:
        self.progress = Tail(directory / PROGRESS, limits.progress if limits else None)
        self.evaluation = Tail(directory / EVALUATION, limits.evaluation if limits else None)
        self.problem = ""

    def read_into(self, history: History) -> bool:
        """Adds what is new; False if a file is not the one that was begun with. Raises Trouble."""
        return self._read(self.progress, history.iterations, PROGRESS, 1) and self._read(
            self.evaluation, history.evaluations, EVALUATION, 0
        )

    def _read(self, tail: Tail, sequence: Sequence, name: str, first: int) -> bool:
        for line in tail.read():
            if tail.restarted:
                return False
            entry = self._entry(line, f"{name}, line {tail.lines}", first)
            if entry:
                sequence.add(entry)
        return not tail.restarted

    def _entry(self, line: bytes | None, where: str, first: int) -> Entry | None:
        try:
            if line is None:
                raise BadLine("it is too long")
            return parse(line, first=first) if line.strip() else None
        except BadLine as error:
            self.problem = f"{where}: {error}"
            return None


class Attempt:
    """One attempt that has begun, and the history up to now."""

    def __init__(self, job: Path, record: Record) -> None:
        """Raises Trouble."""
        self._job = job
        self.record = record
        self._build()

    def _build(self) -> None:
        self.history = _inherited(self._job, self.record)
        self.files = Files(self._job / f"a{self.record.attempt}")

    def refresh(self) -> str:
        """Reads on; a problem in words, empty while all is well. Raises Trouble."""
        if not self.files.read_into(self.history):
            self._build()
            self.files.read_into(self.history)
        return self.files.problem

    def seal(self) -> Predecessor:
        """How much of the files counts now."""
        files = self.files
        return Predecessor(
            attempt=self.record.attempt, progress=files.progress.consumed, evaluation=files.evaluation.consumed
        )


def begin(job: Path, attempt: int, given: Point, start: str) -> Attempt | Stale:
    """Begins an attempt, or goes on with it after a restart of its reader.

    Args:
        job: the job's directory; it is made if need be.
        attempt: number of the attempt.
        given: what the driver was told to go on from.
        start: the checkpoint that the job starts from, or "".

    Raises:
        Trouble: the storage can't be read or written.
    """
    try:
        job.mkdir(parents=True, exist_ok=True)
        record = _load(job, attempt)
        if record is None:
            found = _first_record(job, attempt, given, start)
            if isinstance(found, Stale):
                return found
            record = found
            (job / f"a{attempt}").mkdir(exist_ok=True)
            _store(job, record)
        return Attempt(job, record)
    except OSError as error:
        raise Trouble(f"{job.name}: {error.strerror}") from None


def _first_record(job: Path, attempt: int, given: Point, start: str) -> Record | Stale:
    before = _latest(job, attempt)
    predecessor, resume = None, Point(0, start)
    if before:
        last = Attempt(job, before)
        last.refresh()
        predecessor, resume = last.seal(), last.history.resume_point(start)
    if resume != given:
        return Stale(resume)
    return Record(attempt=attempt, predecessor=predecessor, iteration=resume.iteration)


def _inherited(job: Path, record: Record) -> History:
    """What counts of the attempts before."""
    history, chain = History(), [(record, record.predecessor)]
    while chain[-1][1] is not None:
        before = _load(job, chain[-1][1].attempt)
        if before is None:
            raise Trouble(f"a{chain[-1][1].attempt}.json: it is missing")
        chain.append((before, before.predecessor))
    for later, sealed in reversed(chain):
        if sealed:
            Files(job / f"a{sealed.attempt}", sealed).read_into(history)
        history.cut_after(later.iteration)
    return history


def _latest(job: Path, below: int) -> Record | None:
    found = (re.fullmatch(r"a([1-9][0-9]{0,8})\.json", path.name) for path in job.iterdir())
    numbers = [int(match[1]) for match in found if match and int(match[1]) < below]
    return _load(job, max(numbers)) if numbers else None


def _load(job: Path, attempt: int) -> Record | None:
    path = job / f"a{attempt}.json"
    try:
        return Record.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise Trouble(f"{path.name}: {error.errors()[0]['msg']}") from None


def _store(job: Path, record: Record) -> None:
    """Whole or not at all, and for good."""
    path, new = job / f"a{record.attempt}.json", job / f"a{record.attempt}.json.new"
    with new.open("wb") as file:
        file.write(record.model_dump_json().encode())
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    directory = os.open(job, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
