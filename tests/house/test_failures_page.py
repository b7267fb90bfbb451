"""docs/failures.md is the operator's own table."""

from __future__ import annotations

from everloop_operator.core import failure_classes
from tests.house.tree import REPOSITORY


def test_the_page_is_what_the_table_says() -> None:
    """Write it anew with `python -m everloop_operator.core.failure_classes`."""
    assert (REPOSITORY / "docs" / "failures.md").read_text() == failure_classes.page()
