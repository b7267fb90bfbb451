"""docs/guarantees.md and docs/field-reports.md: every sentence has a test, and the tests are there."""

from __future__ import annotations

import ast
import itertools
import re

import pytest

from tests.house.tree import REPOSITORY

GUARANTEES, REPORTS = (REPOSITORY / "docs" / name for name in ("guarantees.md", "field-reports.md"))
HEADINGS = ("promise", "limit", "what breaks elsewhere")
COMMANDS = frozenset({"make acceptance", "make soak", "python -m tests.soak.outage"})


def rows() -> list[tuple[str, list[str]]]:
    """Each promise, limit or report, and what it says shows it."""
    found = []
    for line in itertools.chain.from_iterable(page.read_text().splitlines() for page in (GUARANTEES, REPORTS)):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and set(line) - set("|- ") and cells[0] not in HEADINGS:
            found.append((cells[0], re.findall(r"`([^`]+)`", cells[-1])))
    return found


@pytest.mark.parametrize(("promise", "shown"), rows(), ids=[row[0][:60] for row in rows()])
def test_a_promise_is_shown_by_tests_that_exist(promise: str, shown: list[str]) -> None:
    """A row names at least one test or command, and each of them is there."""
    assert shown, promise
    for name in shown:
        if name in COMMANDS:
            continue
        path, _, test = name.partition("::")
        source = REPOSITORY / path
        assert source.is_file(), name
        functions = {
            node.name
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not test or test in functions, name


def test_there_is_no_promise_outside_the_tables() -> None:
    """What stands between them says how to read them and what storage must be like, and promises nothing."""
    prose = [line for line in GUARANTEES.read_text().splitlines() if line and not line.startswith(("|", "#"))]
    assert len(prose) == 2
