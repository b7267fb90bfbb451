"""What can go wrong for the session as a whole, and how an engine refuses an operation."""

from __future__ import annotations

from typing import Literal

Category = Literal["user", "server"]


class Fenced(Exception):
    """A newer incarnation owns the storage: nothing that this process does counts any more (exit code 64)."""


class StorageMismatch(Exception):
    """The storage belongs to another session or base model (exit code 65)."""


class StorageFailed(Exception):
    """A write or flush failed; nothing more is acknowledged, a new incarnation has to start (exit code 66)."""


class JournalDamaged(StorageFailed):
    """The journal does not say what it once said: bytes before its end are wrong. Names file and offset."""


class Replaced(JournalDamaged):
    """A record is where it was no more, because a base stands for it now: its operation has to be looked up again."""


class CompactionAbandoned(Exception):
    """A base could not be written; everything is as it was, and a later compaction may do better."""


class EngineRefused(Exception):
    """The engine refused an operation before anything changed.

    Attributes:
        error: what the client is told; names the field for bad content.
        category: `user` for bad content, `server` for anything else.
        out_of_space: the storage is full, over its quota or read-only.
    """

    def __init__(self, error: str, category: Category, *, out_of_space: bool = False) -> None:
        super().__init__(error)
        self.error = error
        self.category: Category = category
        self.out_of_space = out_of_space
