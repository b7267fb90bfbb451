"""The identity of the base model's files, without loading them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def files_sha256(directory: Path) -> str:
    """SHA-256 over the sorted lines `<relative name> <hex sha256 of the content>` of every file below `directory`.

    Names that start with a dot, and what lies in such folders, are book-keeping of mounts and downloads: left out.
    An engine says the same of the files that it loaded. Raises OSError; FileNotFoundError where nothing lies.
    """
    lines = []
    for path in _files(directory):
        with path.open("rb") as file:
            lines.append(
                f"{path.relative_to(directory).as_posix()} {hashlib.file_digest(file, 'sha256').hexdigest()}\n"
            )
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def remembered_files_sha256(directory: Path, memory: Path) -> str:
    """`files_sha256`, computed once per pod: `memory` keeps it for as long as names, sizes and times stay the same."""
    stats = [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in _files(directory)
    ]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    try:
        known = json.loads(memory.read_text())
    except (FileNotFoundError, ValueError):
        known = {}
    if known.get("key") == key:
        return str(known["sha256"])
    found = files_sha256(directory)
    memory.write_text(json.dumps({"key": key, "sha256": found}))
    return found


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )
