"""The Linux system calls that Python's standard library has no name for."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID = 0x20000, 0x4000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 32, 4096, 16384, 1 << 19
MNT_DETACH, PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 2, 1, 36
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """The container can't be started; the text is shown to the user as the container's message."""


def check(result: int, what: str) -> None:
    """Raise `StartError` for a system call that failed."""
    if result != 0:
        raise StartError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: Path, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """Mount, by the system call of that name."""

    def encoded(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    check(
        libc.mount(encoded(source), encoded(str(target)), encoded(kind), ctypes.c_ulong(flags), encoded(data or None)),
        f"mount {source} on {target}",
    )


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    check(libc.unshare(flags), "unshare")


def set_hostname(name: str) -> None:
    """Set the name of this UTS namespace."""
    check(libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def enter_namespace(handle: int) -> None:
    """Join a namespace, given its open file."""
    check(libc.setns(handle, 0), "setns")


def pivot_into(root: Path) -> None:
    """Make `root` the root of the file system and forget the old one."""
    os.chdir(root)
    check(libc.syscall(SYS_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "detach the old root")
    os.chdir("/")


def die_with_parent(number: int) -> None:
    """Have the kernel send a signal to this process when the thread that forked it ends."""
    check(libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl PR_SET_CHILD_SUBREAPER")


def in_user_namespace() -> bool:
    """Whether this is not the machine's first user namespace, where some calls are refused even to root."""
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
