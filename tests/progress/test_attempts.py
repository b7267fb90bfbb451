"""Attempts in storage: what counts of each, and what a zombie can't change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from everloop_progress import tails
from everloop_progress.attempts import Attempt, Stale, begin
from everloop_progress.history import Point
from everloop_progress.reader import Reader, Task
from everloop_progress.tails import Trouble

START = Point(0, "")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "team" / "_jobs" / "poems-uid"


def begun(job: Path, attempt: int, given: Point = START, start: str = "") -> Attempt:
    found = begin(job, attempt, given, start)
    assert isinstance(found, Attempt)
    return found


def saved(number: int) -> Point:
    return Point(number, f"tinker://m/weights/{number}")


def report(job: Path, attempt: int, *numbers: int, name: str = "progress.jsonl", **more: Any) -> None:
    """The driver's lines, each iteration with a checkpoint."""
    with (job / f"a{attempt}" / name).open("a") as file:
        for number in numbers:
            entry = {"iteration": number, "checkpoint": saved(number).checkpoint, **more}
            file.write(json.dumps({k: v for k, v in entry.items() if v is not None}) + "\n")


def counted(attempt: Attempt) -> list[int]:
    attempt.refresh()
    return [entry.iteration for entry in attempt.history.iterations.tail(1000)]


def test_first_attempt_starts_at_the_beginning(job: Path) -> None:
    """The driver's directory is there before the driver is, and empty."""
    attempt = begun(job, 1)
    assert (counted(attempt), list((job / "a1").iterdir())) == ([], [])
    report(job, 1, 1, 2)
    assert counted(attempt) == [1, 2]
    assert counted(begun(job, 1)) == [1, 2], "after a restart of the reader"


def test_successor_goes_on_from_the_last_checkpoint(job: Path) -> None:
    """Iterations after it are done again, and counted once."""
    begun(job, 1)
    report(job, 1, 1, 2, 3)
    report(job, 1, 4, 5, checkpoint=None)
    second = begun(job, 2, saved(3))
    assert counted(second) == [1, 2, 3]
    report(job, 2, 4, 5, 6)
    assert counted(second) == [1, 2, 3, 4, 5, 6]
    third = begun(job, 5, saved(6))
    report(job, 5, 7)
    assert counted(third) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("checkpoint", "done"), [(saved(2).checkpoint, True), (None, False)])
def test_end_of_the_work_is_known_to_a_successor(job: Path, checkpoint: str | None, done: bool) -> None:
    """If the last iteration has a checkpoint; otherwise it is done again."""
    begun(job, 1)
    report(job, 1, 1)
    report(job, 1, 2, checkpoint=checkpoint, done=True)
    resume = saved(2 if checkpoint else 1)
    reader = Reader(Task(job, 2, resume, ""))
    assert reader.report(None)["done"] is done
    report(job, 2, resume.iteration + 1)
    assert reader.report(None)["done"] is False


@pytest.mark.parametrize("given", [START, saved(2), saved(4), Point(3, "tinker://m/weights/other")])
def test_driver_that_was_told_otherwise_is_held_back(job: Path, given: Point) -> None:
    """The storage decides what to go on from, and nothing begins before driver and storage agree."""
    begun(job, 1)
    report(job, 1, 1, 2, 3)
    assert begin(job, 2, given, "") == Stale(saved(3))
    assert not (job / "a2").exists()
    assert counted(begun(job, 3, saved(3))) == [1, 2, 3]


def test_zombie_writes_into_the_void(job: Path) -> None:
    """What a predecessor reports after its successor began counts neither now nor for any later attempt."""
    begun(job, 1)
    report(job, 1, 1, 2)
    with (job / "a1" / "progress.jsonl").open("a") as file:
        file.write('{"iteration": 3, "checkpoint": "tinker://m/we')  # torn by the loss
    second = begun(job, 2, saved(2))
    with (job / "a1" / "progress.jsonl").open("a") as file:
        file.write('ights/3"}\n')
    report(job, 1, 4, 1)
    report(job, 2, 3)
    assert counted(second) == [1, 2, 3]
    assert counted(begun(job, 3, saved(3))) == [1, 2, 3]


def test_attempt_that_never_began_is_passed_over(job: Path) -> None:
    """A zombie that begins late is nobody's predecessor."""
    begun(job, 1)
    report(job, 1, 1)
    third = begun(job, 3, saved(1))
    report(job, 3, 2)
    late = begun(job, 2, saved(1))
    report(job, 2, 2, 3, 4)
    assert counted(late) == [1, 2, 3, 4]
    assert counted(third) == [1, 2]
    assert counted(begun(job, 4, saved(2))) == [1, 2]


def test_job_with_a_start_checkpoint(job: Path) -> None:
    """Until something is saved each attempt starts from it."""
    start = "tinker://other/weights/final"
    begun(job, 1, Point(0, start), start)
    report(job, 1, 1, 2, checkpoint=None)
    assert counted(begun(job, 2, Point(0, start), start)) == []


def test_bad_lines_are_named_and_do_no_harm(job: Path) -> None:
    """Garbage, lines of any length and half a line: the good ones count, the last bad one is told of."""
    attempt = begun(job, 1)
    path = job / "a1" / "progress.jsonl"
    with path.open("ab") as file:
        file.write(b'{"iteration": 1}\nnonsense\n\n' + b"x" * (tails.LONGEST_LINE * 3) + b"\n")
        file.write(b'{"iteration": 2}\n{"iteration": 3')
    assert attempt.refresh() == "progress.jsonl, line 4: it is too long"
    assert counted(attempt) == [1, 2]
    with path.open("ab") as file:
        file.write(b"}\n")
    assert counted(attempt) == [1, 2, 3]


def test_long_line_that_comes_in_parts_is_not_held(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the pieces fall, one endless line costs no memory and no other line."""
    monkeypatch.setattr(tails, "CHUNK", 1000)
    monkeypatch.setattr(tails, "LONGEST_LINE", 100)
    attempt = begun(job, 1)
    with (job / "a1" / "progress.jsonl").open("ab", buffering=0) as file:
        for piece in (b'{"iteration": 1}\n', b"x" * 250, b"y" * 2250, b'z\n{"iteration": 2}\n'):
            file.write(piece)
            attempt.refresh()
    assert counted(attempt) == [1, 2]


def test_file_that_is_written_anew_counts_from_its_beginning(job: Path) -> None:
    """A program that replaces its file, or cuts it, has started over."""
    begun(job, 1)
    report(job, 1, 1, 2)
    attempt = begun(job, 2, saved(2))
    report(job, 2, 3, 4, 5)
    assert counted(attempt) == [1, 2, 3, 4, 5]
    path = job / "a2" / "progress.jsonl"
    path.write_text('{"iteration": 3}\n')
    assert counted(attempt) == [1, 2, 3]
    new = path.with_suffix(".new")
    new.write_text("".join(f'{{"iteration": {n}}}\n' for n in range(3, 9)))
    new.rename(path)
    assert counted(attempt) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "huge"])
def test_what_is_no_file_is_not_read(job: Path, tmp_path: Path, kind: str) -> None:
    """A link to elsewhere, a pipe without a writer, a directory, a file beyond all measure: told, not followed."""
    attempt = begun(job, 1)
    path = job / "a1" / "progress.jsonl"
    if kind == "link":
        (tmp_path / "secret").write_text('{"iteration": 7}\n')
        path.symlink_to(tmp_path / "secret")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(tails.LARGEST_FILE + 1)
    with pytest.raises(Trouble, match=r"progress\.jsonl: "):
        attempt.refresh()
    assert len(attempt.history.iterations) == 0


def test_damaged_record_is_told(job: Path) -> None:
    """What the reader itself has written is not guessed at."""
    begun(job, 1)
    (job / "a1.json").write_text("{}")
    with pytest.raises(Trouble, match=r"a1\.json"):
        begin(job, 2, START, "")


def test_record_is_whole_or_not_there(job: Path) -> None:
    """Half a record, from a reader that was killed while it wrote, is written again."""
    job.mkdir(parents=True)
    (job / "a1.json.new").write_text('{"form')
    assert counted(begun(job, 1)) == []
