"""What the machine must bring itself, checked before the first long step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bootstrap.layout import BootstrapError
from bootstrap.progress import size

_GO_MINIMUM = (1, 26)
_DISK_NEEDED = 12_000_000_000  # bytes; torch with its CUDA libraries is most of it


def check(cache: Path, *, cluster: bool) -> None:
    """Check system, rights, tools and disk, and name everything that is missing at once.

    Args:
        cache: where the disk must have room.
        cluster: whether the local cluster will be built and run, which needs root, Go and a C compiler.

    Raises:
        BootstrapError: something is missing.
    """
    missing = []
    if not sys.platform.startswith("linux"):
        missing.append("Linux (the local cluster is made of its namespaces)")
    if cluster:
        if os.geteuid() != 0:
            missing.append("root (the kubelets mount file systems)")
        if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
            missing.append("a C compiler (Debian: gcc)")
        go = go_version()
        if go is None:
            missing.append(f"Go >= {_dotted(_GO_MINIMUM)} on PATH")
        elif go < _GO_MINIMUM:
            missing.append(f"Go >= {_dotted(_GO_MINIMUM)}: this is {_dotted(go)}")
    free = shutil.disk_usage(cache).free
    if free < _DISK_NEEDED:
        missing.append(f"{size(_DISK_NEEDED)} of disk at {cache}: {size(free)} are free (EVERLOOP_CACHE moves it)")
    if missing:
        raise BootstrapError("this machine lacks\n" + "\n".join(f"  * {what}" for what in missing))


def go_version() -> tuple[int, int] | None:
    """Return the version of the Go toolchain on PATH, None without one."""
    go = shutil.which("go")
    if go is None:
        return None
    text = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    match = re.match(r"go(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
