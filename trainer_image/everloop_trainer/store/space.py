"""Storage that takes no more: full, over its quota, or read-only. A person mends that, and the session waits for it."""

from __future__ import annotations

import errno
import secrets

from everloop_trainer.store import layout
from everloop_trainer.store.files import Files

RESERVE = 1 << 24
"""Bytes that must be free again, beside what could not be written, before a session goes on."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def is_full(number: int | None) -> bool:
    """Whether an error of this number (errno) goes away once there is space, or the file system is writable again."""
    return number in _FULL


def try_space(files: Files, size: int) -> None:
    """Return if `size` bytes and the reserve can be written durably now. Raises OSError."""
    try:
        files.create(f"{layout.PROBE}/{secrets.token_hex(8)}", bytes(size + RESERVE))
    finally:
        files.delete(layout.PROBE)
