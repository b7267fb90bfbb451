"""Files that outlast the machine: how store and engine write to a POSIX file system with an honest fsync(2).

A file is on disk once its content was flushed, and its name once its directory was, and so on for each directory above.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from typing_extensions import Buffer

DIRECTORY_MODE = 0o750


class Directories:
    """Makes directories, and remembers of which the name is on disk.

    One that exists is no proof: whoever made it may have been killed before the flush. So each is flushed into its
    parent once, up to the mount point, by every process that puts something into it.
    """

    def __init__(self) -> None:
        self._durable: set[Path] = set()

    def make(self, directory: Path) -> None:
        """Return once the directory is there, and its name on disk. Raises OSError."""
        if os.path.ismount(directory) or (directory in self._durable and directory.is_dir()):
            return
        self.make(directory.parent)
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        sync_directory(directory.parent)
        self._durable.add(directory)

    def forget(self, directory: Path) -> None:
        """The directory was removed, with what was below it."""
        known = tuple(self._durable)  # at once: other threads make directories meanwhile
        self._durable.difference_update(path for path in known if path.is_relative_to(directory))


def sync_directory(directory: Path) -> None:
    """Return once the names in a directory, and the lack of those that were removed, are on disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: Buffer) -> int:
    """Write all of `data`, which takes several calls if a file system says so; returns its bytes. Raises OSError."""
    view = memoryview(data).cast("B")
    size = len(view)
    while view:
        view = view[os.write(descriptor, view) :]
    return size


def write_file(path: Path, parts: Iterable[Buffer], mode: int) -> tuple[str, int]:
    """Write a new file with its directories, all of it on disk; returns the SHA-256 (hex) and the size in bytes.

    Raises FileExistsError if there is such a file, and OSError if storage fails; no partial file is left behind.
    """
    Directories().make(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            digest = hashlib.sha256()
            size = 0
            for part in parts:
                digest.update(part)
                size += write_all(descriptor, part)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(path.parent)
    except BaseException:
        path.unlink()
        raise
    return digest.hexdigest(), size
