"""The files of the repository as they lie on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = ("bootstrap", "demo", "devcluster", "examples", "monitoring", "operator", "trainer_image")
_SKIPPED = {"build", "__pycache__", ".git"}  # the last is a file in a linked work tree
_POINTER = ".git"
"""In a further work tree of git a file with the place of the first one: nothing of the repository."""
_DATA = {".png", ".gif", ".jpg", ".safetensors", ".bin"}


def files(*tops: str, suffix: str = "") -> Iterator[Path]:
    """Every text file below the named directories, or of the whole repository, that is not made by a tool."""
    for top in tops or ("",):
        for directory, subdirectories, names in os.walk(REPOSITORY / top):
            subdirectories[:] = sorted(
                name for name in subdirectories if name not in _SKIPPED and (not name.startswith(".") or name == ".ci")
            )
            for name in sorted(set(names) - {_POINTER}):
                path = Path(directory, name)
                if (
                    name not in _SKIPPED
                    and name.endswith(suffix)
                    and path.suffix not in _DATA
                    and not path.is_symlink()
                ):
                    yield path


def shown(path: Path) -> str:
    """The path as a reader of the repository knows it."""
    return path.relative_to(REPOSITORY).as_posix()
