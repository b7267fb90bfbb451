"""Prepares a machine for the demo and the tests: everything goes into one cache directory outside the checkout."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bootstrap import interpreter, layout, prune, stage, status
from bootstrap.environments import NAMES, Environments
from bootstrap.layout import BootstrapError
from bootstrap.lock import exclusive
from bootstrap.progress import Progress


def _exec(environments: Environments, name: str, command: Sequence[str]) -> None:
    """Replace this process by `command` with the environment `name` first on PATH and the checkout importable."""
    binaries = environments.directory(name) / "bin"
    environment = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": ":".join(str(layout.REPOSITORY / top) for top in ("operator", "trainer_image", "")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "EVERLOOP_CACHE": str(environments.cache),
    }
    os.execvpe(command[0], list(command), environment)


def _environments(cache: Path) -> Environments:
    return Environments(cache, interpreter.choose(cache, Progress(cache)))


def clean(cache: Path) -> None:
    """Remove what this package and `devcluster` made in `cache`, and the cache if nothing else is in it."""
    for name in layout.CONTENTS:
        path = cache / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if not any(cache.iterdir()):
        cache.rmdir()


def _end_children() -> None:
    """Kill what was being started when the signal came: no caller knows of it yet, so none has ended it."""
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m bootstrap", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("ensure", help="make everything that a target needs, if it is not there")
    make.add_argument("target", choices=sorted(stage.TARGETS))
    execute = commands.add_parser("exec", help="run a command in an environment, made if need be")
    execute.add_argument("environment", choices=NAMES)
    execute.add_argument("arguments", nargs=argparse.REMAINDER, metavar="COMMAND")
    commands.add_parser("status", help="show what the cache holds, and how large it is")
    commands.add_parser("prune", help="remove what neither the present sources nor a running process uses")
    commands.add_parser("clean", help="remove all that was made in the cache")
    given = parser.parse_args(arguments)

    os.umask(0o022)  # containers run as uid 1000 and read what lies in the cache
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no child may go on building what the next run repeats
    try:
        cache = layout.cache_directory()
        if given.command == "ensure":
            stage.ensure(cache, stage.TARGETS[given.target])
        elif given.command == "exec":
            if not given.arguments:
                parser.error("exec: a command is missing")
            _exec(stage.ensure(cache, stage.Parts((given.environment,))), given.environment, given.arguments)
        elif given.command == "clean":
            with exclusive(cache):
                clean(cache)
        elif given.command == "prune":
            with exclusive(cache):
                prune.prune(_environments(cache))
        else:
            status.show(_environments(cache))
    except BootstrapError as error:
        print(f"everloop: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _end_children()
        print("\neverloop: stopped; what was finished is kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
