"""What the cache holds and how large it is."""

from __future__ import annotations

from bootstrap import prune
from bootstrap.disk import disk_use
from bootstrap.environments import Environments
from bootstrap.progress import size


def show(environments: Environments) -> None:
    """Print a table of what is there, what is missing, and what the present sources no longer use."""
    cache = environments.cache
    seen: set[int] = set()
    print(f"cache {cache}, Python {environments.python.version_text} ({environments.python.executable})")
    for path, what in prune.wanted(environments).items():
        state = size(disk_use(path, seen)) if path.exists() else "missing"
        print(f"  {what:32} {state:>9}  {path.relative_to(cache)}")
    for name in ("uv-cache", "logs", "go"):
        if (cache / name).is_dir():
            print(f"  {'':32} {size(disk_use(cache / name, seen)):>9}  {name}")
    superseded = prune.superseded(environments)
    for path in superseded:
        print(f"  {'unused':32} {size(disk_use(path, seen)):>9}  {path.relative_to(cache)}")
    if superseded:
        print("`make prune` removes what is unused.")
    print("Sizes count each file once: environments share theirs with uv-cache. `make clean-cache` removes everything.")
