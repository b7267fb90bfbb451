"""What the cache holds and how large it is."""

from __future__ import annotations

import os
from pathlib import Path

from bootstrap import cluster, images, weights
from bootstrap.environments import NAMES, Environments
from bootstrap.layout import COMPLETE
from bootstrap.progress import size


def show(environments: Environments) -> None:
    """Print a table of what is there, what is missing, and what the present sources no longer use."""
    cache = environments.cache
    binaries = cluster.Binaries.locate()
    wanted = {environments.directory(name): f"environment {name}" for name in NAMES}
    wanted[binaries.kubectl.parent] = "Kubernetes, one binary"
    wanted[binaries.helm.parent] = "Helm"
    wanted[weights.directory(cache)] = f"model {weights.MODEL}"
    wanted |= {images.directory(cache, image): f"image {image.name}" for image in images.IMAGES}
    seen: set[int] = set()
    print(f"cache {cache}, Python {environments.python.version_text} ({environments.python.executable})")
    for directory, what in wanted.items():
        state = size(disk_use(directory, seen)) if directory.is_dir() else "missing"
        print(f"  {what:32} {state:>9}  {directory.relative_to(cache)}")
    shared = [cache / name for name in ("uv-cache", "tools", "logs")]
    for directory in shared:
        print(f"  {'':32} {size(disk_use(directory, seen)):>9}  {directory.relative_to(cache)}")
    for marker in sorted([*cache.glob(f"*/*/{COMPLETE}")]):
        if marker.parent not in wanted and not any(marker.is_relative_to(top) for top in shared):
            print(f"  {'unused':32} {size(disk_use(marker.parent, seen)):>9}  {marker.parent.relative_to(cache)}")
    print("Sizes count each file once: environments share theirs with uv-cache. `make clean-cache` removes everything.")


def disk_use(top: Path, seen: set[int]) -> int:
    """Return the bytes of the files below `top` that `seen`, the numbers of files counted before, lacks."""
    total = 0
    for directory, _, names in os.walk(top):
        for name in names:
            state = Path(directory, name).lstat()
            if state.st_ino not in seen:
                seen.add(state.st_ino)
                total += state.st_blocks * 512
    return total
