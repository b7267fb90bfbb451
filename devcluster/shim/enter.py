"""Becoming a container's user and program, and doing so in a container that runs already."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from devcluster.shim import linux
from devcluster.shim.linux import StartError


def become(spec: dict[str, Any]) -> NoReturn:
    """Take the container's user and environment, then its program.

    Raises:
        StartError: the user can't be taken, or there is no such program.
    """
    os.chdir(spec["cwd"])
    try:
        if os.getuid() == 0 and spec["uid"] is not None:
            if not linux.in_user_namespace():  # where setgroups is denied
                os.setgroups(spec["groups"])
            os.setgid(spec["gid"])
            os.setuid(spec["uid"])
    except OSError as e:
        raise StartError(f"become user {spec['uid']}:{spec['gid']}: {e.strerror}") from e
    linux.die_with_parent(signal.SIGKILL)  # after setuid, which clears it
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    # Not os.execvpe: it imports a module, which this user may not be able to read.
    program, error = spec["argv"][0], errno.ENOENT
    folders = [""] if "/" in program else spec["env"]["PATH"].split(":")
    for folder in folders:
        try:
            os.execve(f"{folder}/{program}" if folder else program, spec["argv"], spec["env"])  # noqa: S606  that is what a container is
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTDIR):
                error = e.errno or error
    raise StartError(f"exec {program!r}: {os.strerror(error)}")


def enter(directory: Path, argv: list[str]) -> int:
    """Run a command with the namespaces, user and environment of a container and return its exit status."""
    spec = json.loads((directory / "spec.json").read_text())
    pid = json.loads((directory / "started.json").read_text())["pid"]
    spec["argv"] = argv
    handles = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("pid", "uts", "mnt")]
    for handle in handles:
        linux.enter_namespace(handle)
        os.close(handle)
    child = os.fork()
    if child == 0:
        try:
            become(spec)
        except (StartError, OSError) as e:
            print(e, file=sys.stderr, flush=True)
        os._exit(126)
    return exit_code(os.waitpid(child, 0)[1])


def exit_code(status: int) -> int:
    """Return the exit code of a wait status, 128 + number for a signal as shells do."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
