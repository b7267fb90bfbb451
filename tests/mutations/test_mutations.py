"""Every flush and every reading of the fence is needed: without it, the named test goes red.

The call sites are found in the sources, so that a new one without a test of its own is noticed too.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINER = Path("trainer_image/everloop_trainer")
GUARDS = frozenset({"fsync", "fdatasync", "_sync_directory", "flush", "sync", "read_fence", "check_fence"})

POSIX = "tests/store/test_posix_files.py::"
CREATE = POSIX + "test_create_syncs_data_before_the_name_and_the_name_before_returning"
DIRECTORIES = POSIX + "test_new_directories_are_synced_into_their_parents"
FENCE = "tests/session/test_fence.py::"
NOTICED = {
    # flushes
    "store/files.py PosixFiles.create: os.fsync(descriptor)": CREATE,
    "store/files.py PosixFiles.create: _sync_directory(target.parent)": CREATE,
    "store/files.py PosixFiles.open_append: os.fsync(descriptor)": DIRECTORIES,
    "store/files.py PosixFiles.open_append: _sync_directory(target.parent)": DIRECTORIES,
    "store/files.py PosixFiles.sync: os.fsync(descriptor)": POSIX + "test_sync_is_an_fsync_of_that_file",
    "store/files.py PosixFiles._make_directory: _sync_directory(new.parent)": DIRECTORIES,
    "store/files.py _PosixAppendFile.flush: os.fdatasync(self._descriptor)": POSIX + "test_append_flushes_by_fdatasync",
    "store/files.py _sync_directory: os.fsync(descriptor)": DIRECTORIES,
    "store/journal.py JournalWriter._write: self._file.flush()": (
        "tests/session/test_crash_matrix.py::test_power_loss_that_leaves_holes"
    ),
    "store/sealed.py _seal_tail: files.sync(path)": (
        "tests/store/test_sealed.py::test_what_a_killed_process_left_unflushed_is_made_durable_before_it_is_sealed"
    ),
    # the fence, before each outside effect
    "store/journal.py JournalWriter._write: read_fence(self._files, self._number)": (
        "tests/store/test_journal.py::test_the_fence_is_read_after_the_flush"
    ),
    "store/journal.py JournalWriter.check_fence: await asyncio.to_thread(read_fence, self._files, self._number)": (
        FENCE + "test_a_zombie_delivers_no_result"
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
    "session/service.py SessionService.outcome: await self._context.journal.check_fence()": (
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
}
"""By call site: the test, or the file of tests, that goes red without it."""


@dataclass(frozen=True)
class Site:
    """One guard: a statement of one line in a file of the trainer."""

    file: str
    line: int
    name: str


def _calls_guard(statement: ast.Expr) -> bool:
    names = [node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)]
    names += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return not GUARDS.isdisjoint(names)


def _statements(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, ast.Expr]]:
    for node in body:
        if isinstance(node, ast.Expr):
            yield within, node
            continue
        inner = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{within}.{node.name}".lstrip(".")
        for field in ("body", "orelse", "finalbody", "handlers"):
            for child in getattr(node, field, []):
                yield from _statements([child] if isinstance(child, ast.stmt) else child.body, inner)


def sites() -> dict[str, Site]:
    """Every guard of store and session, by its name in the table."""
    found: dict[str, Site] = {}
    for path in sorted((ROOT / TRAINER).glob("s[te]*/*.py")):
        file = f"{path.parent.name}/{path.name}"
        if path.parent.name not in ("store", "session"):
            continue
        seen: Counter[str] = Counter()
        for within, statement in _statements(ast.parse(path.read_text()).body):
            if not _calls_guard(statement):
                continue
            name = f"{file} {within}: {ast.unparse(statement)}"
            seen[name] += 1
            assert statement.lineno == statement.end_lineno, f"{name}: a guard of several lines cannot be cut out"
            name = name if seen[name] == 1 else f"{name} #{seen[name]}"
            found[name] = Site(file, statement.lineno, name)
    return found


SITES = sites()


def test_the_table_names_every_guard() -> None:
    """A flush or a reading of the fence that is new, moved or gone has to be entered."""
    assert sorted(NOTICED) == sorted(SITES)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the trainer and of the tests of store and session, that a test may spoil."""
    root = tmp_path_factory.mktemp("mutant")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / TRAINER, root / TRAINER, ignore=ignored)
    for name in ("store", "session"):
        shutil.copytree(ROOT / "tests" / name, root / "tests" / name, ignore=ignored)
    for name in ("pyproject.toml", "tests/conftest.py", "tests/prepared.py"):
        shutil.copy(ROOT / name, root / name)
    (root / "operator").symlink_to(ROOT / "operator")
    (root / "bootstrap").symlink_to(ROOT / "bootstrap")
    return root


def run(root: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the copy until the first goes red."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_named_tests_pass_while_nothing_is_missing(copy: Path) -> None:
    """Red below means the missing guard, and nothing else."""
    ended = run(copy, *sorted(set(NOTICED.values())))
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.parametrize("name", sorted(NOTICED))
def test_a_missing_guard_is_noticed(copy: Path, name: str) -> None:
    """Cut one guard out, and the test that the table names goes red."""
    site = SITES[name]
    path = copy / TRAINER / site.file
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    line = lines[site.line - 1]
    lines[site.line - 1] = line[: len(line) - len(line.lstrip())] + "pass\n"
    path.write_text("".join(lines))
    try:
        ended = run(copy, NOTICED[name])
    finally:
        path.write_text(whole)
    assert ended.returncode == 1, f"nothing went red without {name}\n{ended.stdout[-2000:]}"
