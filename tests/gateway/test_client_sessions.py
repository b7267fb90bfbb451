"""Which of a key's sessions a search finds, in which order and by how many. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from everloop_gateway.client_sessions import ClientSession, merged, search, unkept
from everloop_gateway.refusal import Refusal


def part(number: int, created: str, **counts: Any) -> dict[str, Any]:
    """What a pod tells of a session."""
    empty = {"models": [], "samplers": [], "checkpoints": 0, "bytes": 0}
    return {"session_id": f"s-{number}", "created": created, **empty, **counts}


SESSIONS = merged(part(number, f"2030-01-0{1 + number // 2}T00:00:00.000Z") for number in range(5))


def test_one_that_made_something_in_several_pods_is_one() -> None:
    """With the earlier beginning, and all that it has made."""
    first = part(1, "2030-01-02T00:00:00Z", models=["a"], samplers=["b"], checkpoints=1, bytes=10)
    second = part(1, "2030-01-01T00:00:00Z", models=["c"], checkpoints=2, bytes=5)
    assert merged([first, second]) == [ClientSession("s-1", "2030-01-01T00:00:00Z", ("a", "c"), ("b",), 3, 15)]


def test_a_search_goes_page_by_page() -> None:
    """Newest first, each once, also where several began at the same time; the last page has no cursor."""
    asked: dict[str, Any] = {"limit": 2}
    pages = []
    while True:
        answer = search(SESSIONS, asked, "ada", "team")
        pages.append([each["session_id"] for each in answer["sessions"]])
        if answer["next_cursor"] is None:
            break
        cursor = answer["next_cursor"]
        asked["cursor"] = {**cursor, "last_created_at": cursor["last_created_at"].replace(".000Z", "Z")}  # as the SDK
    assert pages == [["s-4", "s-3"], ["s-2", "s-1"], ["s-0"]]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, 5),
        ({"session_id": "s-3"}, 1),
        ({"session_id": "s-9"}, 0),
        ({"owner": {"type": "own"}}, 5),
        ({"owner": {"type": "accessible"}}, 5),
        ({"owner": {"type": "user", "owner_urns": ["eve", "ada"]}}, 5),
        ({"owner": {"type": "user", "owner_urns": ["eve"]}}, 0),
        ({"user_metadata": {}, "statuses": None}, 5),
        ({"project_ids": None}, 5),
        ({"project_ids": ["team"]}, 5),
    ],
)
def test_what_is_found(asked: dict[str, Any], found: int) -> None:
    """By id, owner and project, which is the namespace."""
    shown = search(SESSIONS, asked, "ada", "team")["sessions"]
    assert len(shown) == found
    assert all(each["project_id"] == "team" for each in shown)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", 3),
        ("session_id", ["s-3"]),
        ("user_metadata", {"a": "b"}),
        ("user_metadata", []),
        ("user_metadata", None),
        ("display_name", "nightly"),
        ("display_name", ""),
        ("statuses", [{"type": "active"}]),
        ("statuses", {}),
        ("project_ids", ["p"]),
        ("project_ids", ["team", "p"]),
        ("project_ids", [3]),
        ("project_ids", [None]),
        ("project_ids", []),
        ("project_ids", 0),
        ("limit", 0),
        ("limit", 201),
        ("limit", True),
        ("cursor", {"last_created_at": 1}),
        ("cursor", {"last_created_at": "yesterday", "last_session_id": "s-1"}),
        ("cursor", {"last_created_at": "2030-01-01T00:00:00", "last_session_id": "s-1"}),
        ("owner", {"type": "user"}),
        ("owner", {"type": "user", "owner_urns": []}),
        ("owner", {"type": "user", "owner_urns": ["ada"] * 11}),
        ("owner", {"type": "user", "owner_urns": ["ada", 1]}),
        ("owner", "ada"),
        ("owner", None),
    ],
)
def test_what_cannot_be_asked_for_is_named(field: str, value: object) -> None:
    """Rather than found empty."""
    with pytest.raises(Refusal) as refused:
        search(SESSIONS, {field: value}, "ada", "team")
    assert refused.value.status == 400
    assert refused.value.detail.startswith(f"{field}: ")


def test_a_new_session_is_told_what_is_not_kept_of_it() -> None:
    """By field; and nothing if it gives nothing of the kind."""
    assert unkept({"user_metadata": {}, "tags": []}) == ""
    told = unkept({"user_metadata": {"a": "b"}, "display_name": "nightly", "tags": ["a"]})
    assert [each.partition(": ")[0] for each in told.split("; ") if ": " in each] == [
        "user_metadata", "display_name", "tags",
    ]  # fmt: skip
