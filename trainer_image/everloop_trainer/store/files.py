"""The file operations that the store needs, and their POSIX form. Paths are relative to the session's root.

Nothing here needs rename or overwrite. A name that was created is on disk together with its directory.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import IO, Protocol

from everloop_trainer.durable import Directories, sync_directory, write_all

COPY_BYTES = 1 << 20
TEMPORARY = ".tmp-"
FILE_MODE = 0o640


class AppendFile(Protocol):
    """A new file that only grows. Methods raise OSError."""

    def append(self, data: bytes) -> None:
        """Write all of `data` at the end; only `flush` makes it outlast the machine."""

    def flush(self) -> None:
        """Return once everything appended is on disk."""

    def close(self) -> None:
        """Give the handle back without flushing."""


class Files(Protocol):
    """Everything that the store does to a file system. Methods raise OSError."""

    def create(self, path: str, data: bytes) -> None:
        """Create a file with its whole content, durably, or raise FileExistsError. Makes parent directories."""

    def open_append(self, path: str) -> AppendFile:
        """Create an empty file, durably, or raise FileExistsError. Makes parent directories."""

    def open_read(self, path: str) -> IO[bytes]:
        """Open a file for reading."""

    def exists(self, path: str) -> bool:
        """Whether a file or directory of that name exists now."""

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; none if it does not exist."""

    def sync(self, path: str) -> None:
        """Make what can be read of a file durable, and its name, whoever wrote it."""

    def sha256(self, path: str) -> tuple[str, int]:
        """Hash and size in bytes of a file."""

    def delete(self, path: str) -> None:
        """Remove a directory and what is in it, or do nothing if there is none."""

    def remove(self, path: str) -> None:
        """Remove a file, or do nothing if there is none."""

    def absolute(self, path: str) -> str:
        """The path as another process on this machine can open it."""


class PosixFiles:
    """Files under a root directory of a POSIX file system that keeps link(2) exclusive and fsync(2) honest."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directories = Directories()

    def create(self, path: str, data: bytes) -> None:
        """See Files: temporary file, fsync, link(2), fsync of the directory."""
        target = self._root / path
        self._directories.make(target.parent)
        temporary = target.parent / (TEMPORARY + secrets.token_hex(8))
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.link(temporary, target)
        finally:
            temporary.unlink()
        sync_directory(target.parent)

    def open_append(self, path: str) -> AppendFile:
        """See Files."""
        target = self._root / path
        self._directories.make(target.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(target, flags, FILE_MODE)
        try:
            os.fsync(descriptor)
            sync_directory(target.parent)
        except OSError:
            os.close(descriptor)
            raise
        return _PosixAppendFile(descriptor)

    def open_read(self, path: str) -> IO[bytes]:
        """See Files."""
        return (self._root / path).open("rb")

    def exists(self, path: str) -> bool:
        """See Files. Any answer but "no such file" is an error: a fence that cannot be read is not absent."""
        try:
            (self._root / path).stat()
        except FileNotFoundError:
            return False
        return True

    def list(self, path: str) -> list[str]:
        """See Files; temporary names are left out."""
        try:
            names = os.listdir(self._root / path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY))

    def sync(self, path: str) -> None:
        """See Files."""
        target = self._root / path
        descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(target.parent)  # whoever put it there had made the directories durable before

    def sha256(self, path: str) -> tuple[str, int]:
        """See Files."""
        digest = hashlib.sha256()
        size = 0
        with self.open_read(path) as file:
            while chunk := file.read(COPY_BYTES):
                digest.update(chunk)
                size += len(chunk)
        return digest.hexdigest(), size

    def delete(self, path: str) -> None:
        """See Files."""
        try:
            shutil.rmtree(self._root / path)
        except FileNotFoundError:
            return
        self._directories.forget(self._root / path)

    def remove(self, path: str) -> None:
        """See Files."""
        (self._root / path).unlink(missing_ok=True)

    def absolute(self, path: str) -> str:
        """See Files."""
        return str((self._root / path).absolute())


class _PosixAppendFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def append(self, data: bytes) -> None:
        write_all(self._descriptor, data)

    def flush(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
