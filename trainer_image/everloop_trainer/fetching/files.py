"""A file of a base model at its source, and how it is known to have come whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

CHUNK = 1 << 20
CheckKind = Literal["sha256", "md5", "git", "size"]


class FetchFailed(Exception):
    """The files could not be fetched; the message names source and file, and holds no secret."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file at its source. `check` is what `digest` is: `git` the id of a git blob, `size` that nothing is known."""

    name: str
    size: int
    check: CheckKind
    digest: str = ""


class Source(Protocol):
    """Where files come from. Methods raise FetchFailed."""

    @property
    def title(self) -> str:
        """How messages call it."""

    def files(self) -> tuple[str, Sequence[SourceFile]]:
        """The revision that they are of, as exactly as the source knows it, and all files of the model."""

    def fetch(self, file: SourceFile, directory: Path) -> None:
        """Put the file below `directory`, going on where an earlier try broke off."""


def is_whole(path: Path, file: SourceFile) -> bool:
    """Whether a file is what the source says of it. Raises OSError."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.check == "size":
        return True
    digest = hashlib.new("sha1" if file.check == "git" else file.check, usedforsecurity=False)
    if file.check == "git":
        digest.update(f"blob {file.size}\0".encode())
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == file.digest
