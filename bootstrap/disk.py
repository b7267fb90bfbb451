"""How much disk something takes."""

from __future__ import annotations

import os
from pathlib import Path


def disk_use(top: Path, seen: set[int]) -> int:
    """Return the bytes of a file, or of the files below a directory, that `seen`, the numbers counted before, lacks."""
    total = 0
    below = (Path(directory, name) for directory, _, names in os.walk(top) for name in names)
    for path in below if top.is_dir() else [top]:
        state = path.lstat()
        if state.st_ino not in seen:
            seen.add(state.st_ino)
            total += state.st_blocks * 512
    return total
