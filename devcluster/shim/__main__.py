"""Runs or enters a container.

    shim run CONTAINER_DIR           start the container that CONTAINER_DIR/spec.json describes
    shim exec CONTAINER_DIR CMD..    run a command inside a running container

Started as ``python -I -S .../shim/__main__.py``, without site packages, which takes 20 ms.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from devcluster.shim import container, enter


def main() -> int:
    """Do what the arguments say and return the exit status."""
    command, directory, *argv = sys.argv[1:]
    if command == "run":
        return container.run(Path(directory))
    if command == "exec":
        return enter.enter(Path(directory), argv)
    print(f"shim: unknown command {command!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
