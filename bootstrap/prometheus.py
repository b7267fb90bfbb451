"""The tests' Prometheus: the machine's own, or Debian's package, unpacked into the cache and not installed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bootstrap.progress import Progress, run

PACKAGE = "prometheus"


def directory(cache: Path) -> Path:
    """Return where the unpacked package lies or will lie."""
    return cache / PACKAGE / "debian"


def binary(cache: Path, name: str = "prometheus") -> Path:
    """Return where `prometheus` or `promtool` lies or will lie."""
    own = shutil.which(name)
    return Path(own) if own else directory(cache) / "usr" / "bin" / name


def ensure(cache: Path, progress: Progress) -> None:
    """Fetch and unpack it if it is missing: 20 MB, a few seconds. Raises BootstrapError."""
    if binary(cache).exists():
        return
    target = directory(cache)
    target.parent.mkdir(exist_ok=True)
    with progress.step("Prometheus: Debian's package") as log, tempfile.TemporaryDirectory(dir=target.parent) as work:
        run(["apt-get", "update", "-qq"], log)
        # As root: the package manager's own user can't write here.
        run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", PACKAGE], log, cwd=Path(work))
        (package,) = Path(work).glob("*.deb")
        run(["dpkg-deb", "--extract", str(package), f"{work}/unpacked"], log)
        Path(work, "unpacked").rename(target)
