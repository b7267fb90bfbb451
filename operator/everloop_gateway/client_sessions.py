"""Sessions of clients: those of a key, by what they have made in the session pods of its namespace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from everloop_gateway.ids import shorten
from everloop_gateway.projects import refuse_other_projects
from everloop_gateway.refusal import Refusal

LONGEST_SEARCH = 200
DEFAULT_SEARCH = 50
"""Sessions in a page of a search, as the SDK has it."""
MOST_OWNERS = 10
"""Whose sessions a search may be for, as the SDK has it."""
UNKEPT = {
    "user_metadata": "what is given to a session is not kept; a training run keeps what it is created with",
    "display_name": "sessions keep no name",
    "tags": "sessions keep no tags",
    "statuses": "it is not known of a session whether its client has ended",
}
"""By field of a search: why nothing can be found by it."""


@dataclass(frozen=True, slots=True)
class ClientSession:
    """One session; `created` is RFC 3339."""

    session_id: str
    created: str
    models: tuple[str, ...]
    samplers: tuple[str, ...]
    checkpoints: int
    bytes: int

    @property
    def age(self) -> tuple[datetime, str]:
        """What sessions are ordered by."""
        return datetime.fromisoformat(self.created), self.session_id


def merged(parts: Iterable[Mapping[str, Any]]) -> list[ClientSession]:
    """Sessions as the pods of a namespace tell of them, newest first: one may have made something in several."""
    found: dict[str, ClientSession] = {}
    for part in parts:
        one = ClientSession(
            part["session_id"],
            part["created"],
            tuple(part["models"]),
            tuple(part["samplers"]),
            part["checkpoints"],
            part["bytes"],
        )
        known = found.get(one.session_id)
        found[one.session_id] = one if known is None else _joined(known, one)
    return sorted(found.values(), key=lambda session: session.age, reverse=True)


def _joined(one: ClientSession, other: ClientSession) -> ClientSession:
    return ClientSession(
        one.session_id,
        min(one.created, other.created, key=datetime.fromisoformat),
        (*one.models, *other.models),
        (*one.samplers, *other.samplers),
        one.checkpoints + other.checkpoints,
        one.bytes + other.bytes,
    )


def search(sessions: list[ClientSession], asked: Mapping[str, Any], subject: str, namespace: str) -> dict[str, Any]:
    """SDK `SessionSearchResponse` to a `SessionSearchRequest`; `sessions` are the key's own. Raises Refusal."""
    _check_projects(asked.get("project_ids"), namespace)
    for name, why in UNKEPT.items():
        nothing: object = {} if name == "user_metadata" else None  # as the SDK's type has it
        if asked.get(name, nothing) != nothing:
            raise Refusal(400, f"{name}: {why}")
    limit, before = _limit(asked.get("limit", DEFAULT_SEARCH)), _cursor(asked.get("cursor"))
    wanted = asked.get("session_id")
    if not isinstance(wanted, str | None):
        raise Refusal(400, "session_id: a string is required")
    found = [
        session
        for session in (sessions if _asks_for_own(asked.get("owner", {"type": "own"}), subject) else [])
        if wanted in (None, session.session_id) and (before is None or session.age < before)
    ]
    page = found[:limit]
    last = page[-1] if len(found) > limit else None
    return {
        "sessions": [_summary(session, subject, namespace) for session in page],
        "next_cursor": None if last is None else {"last_created_at": last.created, "last_session_id": last.session_id},
    }


def unkept(asked: Mapping[str, Any]) -> str:
    """What a client is told that gives its new session what is not kept; empty if it gives nothing of the kind."""
    return "; ".join(f"{name}: {UNKEPT[name]}" for name in ("user_metadata", "display_name", "tags") if asked.get(name))


def _check_projects(projects: object, namespace: str) -> None:
    if projects is None:
        return
    if not isinstance(projects, list) or not projects:
        raise Refusal(400, "project_ids: a list of at least one project is required")
    for project in projects:
        refuse_other_projects(str(project), namespace, "project_ids")


def _summary(session: ClientSession, subject: str, namespace: str) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "created_at": session.created,
        "owner": subject,
        "project_id": namespace,
        "checkpoints_count": session.checkpoints,
        "checkpoint_storage_bytes": session.bytes,
    }


def _asks_for_own(owner: object, subject: str) -> bool:
    match owner:
        case {"type": "own" | "accessible"}:
            return True
        case {"type": "user", "owner_urns": list(urns)} if 1 <= len(urns) <= MOST_OWNERS and _are_texts(urns):
            return subject in urns
    raise Refusal(400, f"owner: must be of type own, accessible or user, the last with 1 to {MOST_OWNERS} owner_urns")


def _are_texts(values: list[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _limit(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LONGEST_SEARCH:
        raise Refusal(400, f"limit: an integer between 1 and {LONGEST_SEARCH} is required")
    return value


def _cursor(value: object) -> tuple[datetime, str] | None:
    """The SDK reads the time and writes it in its own way."""
    match value:
        case None:
            return None
        case {"last_created_at": str(created), "last_session_id": str(session_id)}:
            at = _instant(created)
            if at is not None:
                return at, session_id
    raise Refusal(400, f"cursor: {shorten(str(value))!r} is no next_cursor of an answer")


def _instant(text: str) -> datetime | None:
    """The time that a text with its offset says."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if at.tzinfo is None else at
