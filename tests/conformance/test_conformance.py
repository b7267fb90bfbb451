"""docs/conformance.md says of every part of two SDKs what they themselves said when they were run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.conformance.page import Told, render
from tests.conformance.running import told_by_all
from tests.server.pod import REPOSITORY

PAGE = REPOSITORY / "docs" / "conformance.md"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What the SDKs say."""
    return told_by_all(tmp_path_factory.mktemp("conformance"))


def rows(told: Sequence[Told], state: str) -> list[str]:
    return [f"{each.version} {each.row}: {each.message}" for each in told if each.state == state]


def test_every_call_is_served_or_refused_for_a_reason(told: list[Told]) -> None:
    """No effect is missing, no refusal is unexpected, and nothing that a version offers goes without a probe."""
    assert rows(told, "failed") == []
    assert rows(told, "untested") == []


def test_no_reason_is_given_for_what_is_served(told: list[Told]) -> None:
    """A reason goes when its refusal has gone."""
    refused = {each.row for each in told if each.state == "refused"}
    assert [each.row for each in told if each.reason and each.row not in refused] == []


def test_the_page_is_what_they_say(told: list[Told]) -> None:
    """`make conformance` writes it."""
    assert PAGE.read_text() == render(told)


def test_a_row_of_the_page() -> None:
    """States by version, then what was seen, and messages with who gave them where the versions differ."""
    page = render(
        [
            Told("0.9.0", "C", "C.a", "refused", message="No: a|b", reason="Why."),
            Told("0.10.0", "C", "C.a", "served", seen="it works"),
            Told("0.10.0", "C", "C.b", "untested"),
        ]
    )
    assert "| | 0.10.0 | 0.9.0 | |" in page
    assert "| `C.a` | served | refused | it works `No: a\\|b` (0.9.0) Why. |" in page
    assert "| `C.b` | untested | - |  |" in page
    assert "| 0.10.0 | 1 | 0 | 1 |" in page
