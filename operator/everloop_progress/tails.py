"""Reading on in a file that somebody else appends to, and who may put anything in its place."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

CHUNK = 1 << 20
LONGEST_LINE = 1 << 16
LARGEST_FILE = 1 << 30


class Trouble(Exception):
    """The file can't be read; the message names it and says why."""


class Tail:
    """Gives each complete line once. A last line without its end waits for it."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        """`limit`: bytes beyond which nothing is read, because they were written too late."""
        self._path = path
        self._limit = limit
        self._inode = 0
        self._offset = 0
        self._partial = b""
        self._skipping = False
        self.lines = 0
        self.restarted = False
        """Whether the last reading began at the beginning again, because the file is another one."""

    @property
    def consumed(self) -> int:
        """Bytes of complete lines."""
        return self._offset - len(self._partial)

    def read(self) -> Iterator[bytes | None]:
        """The complete lines since the last reading; None for one that is too long. Raises Trouble."""
        self.restarted = False
        try:
            # Neither a link to elsewhere is followed nor a pipe waited for.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise Trouble(f"{self._path.name}: {why}") from None
        try:
            self._check(os.fstat(descriptor))
            yield from self._lines(descriptor)
        except OSError as error:
            raise Trouble(f"{self._path.name}: {error.strerror}") from None
        finally:
            os.close(descriptor)

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise Trouble(f"{self._path.name}: it is not a regular file")
        if found.st_size > LARGEST_FILE:
            raise Trouble(f"{self._path.name}: it is larger than {LARGEST_FILE} bytes")
        if (self._inode and found.st_ino != self._inode) or found.st_size < self._offset:
            self._offset, self._partial, self._skipping, self.lines = 0, b"", False, 0
            self.restarted = True
        self._inode = found.st_ino

    def _lines(self, descriptor: int) -> Iterator[bytes | None]:
        while True:
            size = CHUNK if self._limit is None else min(CHUNK, self._limit - self._offset)
            chunk = os.pread(descriptor, size, self._offset) if size > 0 else b""
            if not chunk:
                return
            self._offset += len(chunk)
            *complete, self._partial = (self._partial + chunk).split(b"\n")
            for line in complete:
                self.lines += 1
                yield None if self._skipping or len(line) > LONGEST_LINE else line
                self._skipping = False
            if len(self._partial) > LONGEST_LINE:
                self._partial, self._skipping = b"", True
