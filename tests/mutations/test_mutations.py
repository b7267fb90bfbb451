"""Every flush, every reading of the fence and every refusal after it is needed: without it, a test goes red.

The sites are found in the sources, so that a new one without a test of its own is noticed too.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRAINER = Path("trainer_image/everloop_trainer")
SEARCHED = (
    "durable.py",
    "store/*.py",
    "session/*.py",
    "engine/*.py",
    "server/*.py",
    "copies/copier.py",
    "copies/restore.py",
)
GUARDS = frozenset(
    {"fsync", "fdatasync", "sync_directory", "make", "flush", "sync", "read_fence", "check_fence", "still_ours"}
)
"""Functions that make something durable, or read the fence."""
TEXT = re.compile(r"\(f'|\(\{")
"""Where what is said to people begins."""
REFUSALS = frozenset({"Fenced", "Closed", "_failure", "closed_response", "MISDIRECTED"})
"""What is raised or answered by who is fenced off."""

POWER = "tests/store/test_power_loss.py::"
WRITTEN = POWER + "test_what_was_written_is_there"
LEFT = POWER + "test_what_a_killed_process_left_is_made_durable"
JOURNAL = "tests/store/test_journal.py::"
RESTORE = "tests/copies/test_power_loss.py::test_a_storage_with_an_identity_is_whole"
RESTORED_AGAIN = "tests/copies/test_power_loss.py::test_a_restore_makes_durable_what_a_killed_one_left"
FENCE = "tests/session/test_fence.py::"
SERVER = "tests/server/test_fence.py::"
COMPACTION = "tests/session/test_compaction_crashes.py::"
NOTICED = {
    # flushes
    "durable.py Directories.make: self.make(directory.parent)": WRITTEN,
    "durable.py Directories.make: sync_directory(directory.parent)": (
        POWER + "test_what_was_written_beside_a_killed_process_is_there"
    ),
    "durable.py sync_directory: os.fsync(descriptor)": WRITTEN,
    "durable.py write_file: Directories().make(path.parent)": WRITTEN + "[state]",
    "durable.py write_file: os.fsync(descriptor)": WRITTEN + "[state]",
    "durable.py write_file: sync_directory(path.parent)": WRITTEN + "[state]",
    "store/files.py PosixFiles.create: self._directories.make(target.parent)": WRITTEN + "[create]",
    "store/files.py PosixFiles.create: os.fsync(descriptor)": POWER + "test_a_created_file_is_whole_or_not_there",
    "store/files.py PosixFiles.create: sync_directory(target.parent)": WRITTEN + "[create]",
    "store/files.py PosixFiles.open_append: self._directories.make(target.parent)": WRITTEN + "[append]",
    "store/files.py PosixFiles.open_append: os.fsync(descriptor)": (
        "tests/store/test_posix_files.py::test_new_directories_are_synced_into_their_parents"
    ),
    "store/files.py PosixFiles.open_append: sync_directory(target.parent)": WRITTEN + "[new journal]",
    "store/files.py PosixFiles.sync: os.fsync(descriptor)": LEFT,
    "store/files.py PosixFiles.sync: sync_directory(target.parent)": LEFT,
    "store/files.py _PosixAppendFile.flush: os.fdatasync(self._descriptor)": WRITTEN + "[append]",
    "store/journal.py JournalWriter._write: self._file.flush()": (
        JOURNAL + "test_an_acknowledged_record_outlasts_power_loss"
    ),
    "store/journal.py JournalWriter._begin_segment: self._file.flush()": (
        COMPACTION + "test_a_rotation_makes_the_old_file_durable_and_then_the_new_one"
    ),
    "store/journal.py JournalWriter._begin_segment: new.flush()": (
        COMPACTION + "test_a_rotation_makes_the_old_file_durable_and_then_the_new_one"
    ),
    "store/bases.py BaseWriter.finish: self._file.flush()": (
        COMPACTION + "test_death_after_every_write_of_a_compaction[power-lost-loop]"
    ),
    "store/sealed.py _seal_tail: files.sync(path)": (
        "tests/store/test_sealed.py::test_what_a_killed_process_left_unflushed_is_made_durable_before_it_is_sealed"
    ),
    "store/states.py StoredStates._counting: self._files.sync(path)": (
        "tests/session/test_power_loss.py::test_what_a_killed_process_left_is_not_taken_for_flushed[loop]"
    ),
    "copies/restore.py _download: Directories().make(target.parent)": RESTORE,
    "copies/restore.py _download: os.fsync(descriptor)": RESTORE,
    "copies/restore.py _create: files.sync(path)": RESTORED_AGAIN,
    # the fence, before each outside effect
    "copies/copier.py Copier._fence: read_fence(self._files, self._number)": (
        "tests/copies/test_copier.py::test_a_zombie_neither_copies_nor_removes"
    ),
    "copies/copier.py Copier._fence: raise Fenced": (
        "tests/copies/test_copier.py::test_a_zombie_on_storage_that_was_lost_is_fenced_in_s3"
    ),
    "store/epochs.py next_incarnation: raise Fenced": "tests/store/test_epochs.py::test_claim_rule",
    "store/epochs.py read_fence: raise Fenced": "tests/store/test_epochs.py::test_the_fence_is_the_next_epoch",
    "store/journal.py JournalWriter._write: read_fence(self._files, self._number)": (
        JOURNAL + "test_the_fence_is_read_after_the_flush"
    ),
    "store/journal.py JournalWriter.check_fence: await asyncio.to_thread(read_fence, self._files, self._number)": (
        FENCE + "test_a_zombie_delivers_no_result"
    ),
    "store/journal.py JournalWriter.rotate: raise self._failure": COMPACTION + "test_a_zombie_rotates_no_journal",
    "store/journal.py JournalWriter._begin_segment: read_fence(self._files, self._number)": (
        COMPACTION + "test_a_zombie_rotates_no_journal"
    ),
    "store/compacting.py Compactor.replace: await self._journal.check_fence()": (
        COMPACTION + "test_a_zombie_deletes_no_file_that_its_base_stands_for"
    ),
    "store/compacting.py Compactor._give_up: await self._journal.check_fence()": (
        COMPACTION + "test_a_zombie_takes_no_unfinished_base_away"
    ),
    "store/states.py StoredStates.commit: await self._journal.check_fence()": (
        "tests/store/test_states.py::test_the_fence_is_read_before_a_manifest_and_before_a_deletion"
    ),
    "store/states.py StoredStates.delete: await self._journal.check_fence()": (
        "tests/store/test_states.py::test_a_deletion_reads_the_fence_itself"
    ),
    "session/service.py SessionService.accept: await self._context.journal.check_fence()": (
        FENCE + "test_a_zombie_acknowledges_no_repeat"
    ),
    "session/service.py SessionService._ended_before: await journal.check_fence()": (
        COMPACTION + "test_a_zombie_delivers_no_result_of_a_base"
    ),
    "session/service.py SessionService._ended_before: await journal.check_fence() #2": (
        FENCE + "test_a_zombie_calls_nothing_unknown"
    ),
    "session/service.py SessionService._deliver: await self._context.journal.check_fence()": (
        FENCE + "test_a_zombie_delivers_no_result"
    ),
    "session/service.py SessionService._deliver: await self._context.journal.check_fence() #2": (
        FENCE + "test_a_zombie_delivers_no_failure_again"
    ),
    "session/service.py SessionService._watch: await self._context.journal.check_fence()": (
        FENCE + "test_an_idle_zombie_ends"
    ),
    "session/service.py SessionService.cancel: await self._context.journal.check_fence()": (
        FENCE + "test_a_zombie_says_of_no_sample_that_it_is_cancelled_or_unknown"
    ),
    "session/service.py SessionService.completions: await self._context.journal.check_fence()": (
        FENCE + "test_a_zombie_calls_no_samples_of_a_client_unknown"
    ),
    "session/service.py SessionService.completions: await self._context.journal.check_fence() #2": (
        FENCE + "test_a_zombie_tells_no_samples_of_a_client"
    ),
    "session/service.py SessionService.still_ours: await self._context.journal.check_fence()": (
        SERVER + "test_a_zombie_answers_nothing[runs]"
    ),
    "session/keeping.py Keeping._settled: await self._context.journal.check_fence()": (
        "tests/session/test_keeping.py::test_nothing_is_said_by_a_superseded_incarnation"
    ),
    "server/app.py _Routes._runs: await self._gate.call(service.still_ours())": (
        SERVER + "test_a_zombie_answers_nothing[no checkpoint]"
    ),
    "server/app.py _Routes.client_sessions: await self._gate.call(self._gate.service.still_ours())": (
        SERVER + "test_a_zombie_answers_nothing[sessions]"
    ),
    "server/app.py _Routes.get_info: await self._gate.call(service.still_ours())": (
        SERVER + "test_a_zombie_answers_nothing[no model]"
    ),
    "server/checkpoints.py CheckpointRoutes.copy: await self._gate.call(service.still_ours())": (
        SERVER + "test_a_zombie_answers_nothing[no copy]"
    ),
    "server/files.py FileRoutes._stored: await self._gate.call(service.still_ours())": (
        SERVER + "test_a_zombie_answers_nothing[no files]"
    ),
    # what follows from it, or from a flush that failed
    "store/journal.py JournalWriter._enqueue: raise self._failure": JOURNAL + "test_a_failed_flush_is_final",
    "store/journal.py JournalWriter.check_fence: raise self._failure": JOURNAL + "test_a_failed_flush_is_final",
    "store/journal.py JournalWriter.out_of_space: raise self._failure": (
        JOURNAL + "test_who_finds_the_storage_full_goes_no_further"
    ),
    "server/gate.py Gate.service: raise Closed": SERVER + "test_a_call_that_began_before_the_end_is_not_taken_in",
    "server/gate.py Gate.status: raise Closed": SERVER + "test_who_ended_before_it_opened_tells_no_state",
    "server/gate.py Gate.call: raise Closed from reason": SERVER + "test_a_zombie_answers_nothing[an operation]",
    "server/gate.py Gate.poll: raise Closed": SERVER + "test_an_open_poll_ends_with_the_server",
    "server/gate.py Gate.closed_response: return JSONResponse": SERVER + "test_a_zombie_answers_nothing[a result]",
    "server/gate.py Gate.refusal: return JSONResponse": SERVER + "test_a_call_for_another_pod_is_not_answered",
    "server/gate.py Gate.refusal: return self.closed_response()": SERVER + "test_who_has_ended_judges_no_content",
}
"""By guard: the test, or the file of tests, that goes red without it."""


@dataclass(frozen=True)
class Site:
    """One guard: a statement in a file of the trainer, from its first line to its last."""

    file: str
    first: int
    last: int


def _names(node: ast.AST) -> set[str]:
    names = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return names | {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _keywords(node: ast.AST) -> list[ast.keyword]:
    return [each for each in ast.walk(node) if isinstance(each, ast.keyword)]


def _is_guard(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not GUARDS.isdisjoint(_names(statement))
    if isinstance(statement, ast.Return) and "routes" in {word.arg for word in _keywords(statement)}:
        return False  # the table of routes names all there is
    return isinstance(statement, ast.Raise | ast.Return) and not REFUSALS.isdisjoint(_names(statement))


def _statements(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        yield within, node
        inner = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{within}.{node.name}".lstrip(".")
        for field in ("body", "orelse", "finalbody", "handlers"):
            for child in getattr(node, field, []):
                yield from _statements([child] if isinstance(child, ast.stmt) else child.body, inner)


def sites() -> dict[str, Site]:
    """Every guard of the trainer, by its name in the table."""
    found: dict[str, Site] = {}
    trainer = ROOT / TRAINER
    for path in sorted(path for pattern in SEARCHED for path in trainer.glob(pattern)):
        file = path.relative_to(trainer).as_posix()
        seen: Counter[str] = Counter()
        for within, statement in _statements(ast.parse(path.read_text()).body):
            if not _is_guard(statement):
                continue
            name = f"{file} {within}: {TEXT.split(ast.unparse(statement))[0]}"
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name} #{seen[name]}"
            assert statement.end_lineno is not None
            found[name] = Site(file, statement.lineno, statement.end_lineno)
    return found


SITES = sites()


def test_the_table_names_every_guard() -> None:
    """A flush, a reading of the fence or a refusal that is new, moved or gone has to be entered."""
    assert sorted(NOTICED) == sorted(SITES)


class Copy:
    """A copy of the trainer and of its tests that a test may spoil, and a process that runs pytest on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / TRAINER, root / TRAINER, ignore=ignored)
        for name in ("store", "session", "server", "copies"):
            shutil.copytree(ROOT / "tests" / name, root / "tests" / name, ignore=ignored)
        for name in ("pyproject.toml", "tests/conftest.py", "tests/prepared.py"):
            shutil.copy(ROOT / name, root / name)
        for name in ("operator", "bootstrap", "devcluster"):
            (root / name).symlink_to(ROOT / name)
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests/mutations/forks.py"],
            cwd=root,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *tests: str) -> tuple[int, str]:
        """Run tests until the first goes red; the exit code of pytest, and the end of what it said."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--show-capture=no"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that were imported before the fork
        self.process.stdin.write(json.dumps([*options, *tests]) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer["code"], answer["output"][-3000:]

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """One for all tests of this file."""
    made = Copy(tmp_path_factory.mktemp("mutant"))
    yield made
    made.end()


def test_the_named_tests_pass_while_nothing_is_missing(copy: Copy) -> None:
    """Red below means the missing guard, and nothing else."""
    code, output = copy.run(*sorted(set(NOTICED.values())))
    assert code == 0, output


@pytest.mark.parametrize("name", sorted(NOTICED))
def test_a_missing_guard_is_noticed(copy: Copy, name: str) -> None:
    """Cut one guard out, and the test that the table names goes red."""
    site = SITES[name]
    path = copy.root / TRAINER / site.file
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    first = lines[site.first - 1]
    lines[site.first - 1 : site.last] = [first[: len(first) - len(first.lstrip())] + "pass\n"]
    path.write_text("".join(lines))
    try:
        code, output = copy.run(NOTICED[name])
    finally:
        path.write_text(whole)
    assert code == 1, f"nothing went red without {name}\n{output}"
    assert "\nFAILED tests/" in output, output
