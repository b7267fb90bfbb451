"""What a process that serves many clients asks of its system."""

from __future__ import annotations

import ctypes
import resource

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3


def allow_all_connections() -> None:
    """Each call that is held takes file descriptors; what a process begins with may be 1,024 (the soft limit)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_back_at_once() -> None:
    """Have memory of large answers go back to the system as soon as it is free, and not be kept for the next ones.

    glibc raises the size from which it does so by itself whenever such memory is given back, up to 32 MiB (mallopt(3)).
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
