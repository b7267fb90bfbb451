"""Where things lie: the checkout, the cache, and the names of what is in it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPOSITORY / "requirements"
DEFAULT_CACHE = "/var/cache/everloop"
COMPLETE = ".complete"
"""Written last into whatever the cache holds; without it the thing is half made and gets removed."""

COVERED = (Path("/tmp"), Path("/run"), Path("/models"), Path("/var/lib/everloop"))  # noqa: S108 - not used, refused
"""Where pods mount volumes over what the machine has there."""

CONTENTS = (
    *("downloads", "go", "helm", "images", "kube", "logs", "models", "prometheus", "python"),
    *("s3", "tools", "uv-cache", "venvs"),
    *(".helm.lock", ".kube.lock", ".s3.lock", ".python.json.new", "lock", "python.json"),
)
"""Everything that is ever made directly in the cache."""


class BootstrapError(Exception):
    """The machine lacks something, or a step failed; the message says what to do."""


def cache_directory() -> Path:
    """Return the cache (`EVERLOOP_CACHE`, default /var/cache/everloop), made if need be.

    Raises:
        BootstrapError: the path is relative, or containers, which run as uid 1000, could not read it.
    """
    cache = Path(os.environ.get("EVERLOOP_CACHE") or DEFAULT_CACHE)
    if not cache.is_absolute():
        raise BootstrapError(f"EVERLOOP_CACHE={cache}: must be an absolute path")
    cache.mkdir(parents=True, exist_ok=True, mode=0o755)
    closed = first_closed_directory(cache)
    if closed is not None:
        raise BootstrapError(
            f"EVERLOOP_CACHE={cache}: {closed} is closed to other users (mode "
            f"{stat.S_IMODE(closed.stat().st_mode):04o}), and containers run as uid 1000: choose another place"
        )
    return cache


def check_seen_by_containers(cache: Path) -> None:
    """Raise BootstrapError if containers of the local cluster would not find their programs in this cache."""
    for covered in COVERED:
        if cache.resolve().is_relative_to(covered):
            raise BootstrapError(
                f"EVERLOOP_CACHE={cache}: pods have volumes of their own at {covered}: choose another place"
            )


def first_closed_directory(path: Path) -> Path | None:
    """Return the outermost directory of the real `path`, itself included, that other users may not enter."""
    real = path.resolve()
    for directory in [*reversed(real.parents), real]:
        if directory.is_dir() and not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


def content_hash(paths: Iterable[Path], *salt: str) -> str:
    """Return twelve hex digits over the names and bytes of files and of all sources below directories."""
    digest = hashlib.sha256("\0".join(salt).encode())
    for top in paths:
        for path in sorted(source_files(top)) if top.is_dir() else [top]:
            name = path.relative_to(top.parent).as_posix()
            data = path.read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()[:12]


def source_files(top: Path) -> list[Path]:
    """Return the files below `top` that belong to its content: no byte code, nothing hidden."""
    found = []
    for directory, subdirectories, names in os.walk(top):
        subdirectories[:] = [name for name in subdirectories if name != "__pycache__" and not name.startswith(".")]
        found += [Path(directory, name) for name in names if not name.startswith(".") and not name.endswith(".pyc")]
    return found


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, whenever this process ends."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.rename(path)


def is_complete(directory: Path, key: str = "") -> bool:
    """Whether `directory` was finished, and from the sources that `key` stands for."""
    marker = directory / COMPLETE
    return marker.is_file() and marker.read_text().strip() == key


def mark_complete(directory: Path, key: str = "") -> None:
    """Say that `directory` is finished."""
    (directory / COMPLETE).write_text(key + "\n")
