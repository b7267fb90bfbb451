"""Which Python the environments stand on: one that uid 1000, as which containers run, can start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bootstrap.layout import BootstrapError, first_closed_directory, replace_text
from bootstrap.progress import Progress

MINIMUM = (3, 11)
_PROBE = (
    "import json, sys; print(json.dumps([list(sys.version_info[:3]), sys.prefix, sys.base_prefix,"
    " getattr(sys, '_base_executable', sys.executable)]))"
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python installation: `executable` starts it, `base_prefix` holds its standard library."""

    executable: Path
    version: tuple[int, int, int]
    base_prefix: Path

    @property
    def version_text(self) -> str:
        """The version as in `3.11.2`."""
        return ".".join(map(str, self.version))


def probe(executable: str) -> Interpreter | None:
    """Ask `executable` what it is; None if it does not start or is too old. Looks through virtual environments."""
    result = subprocess.run([executable, "-I", "-c", _PROBE], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return None
    version, _, base_prefix, base_executable = json.loads(result.stdout)
    major, minor, micro = version
    if (major, minor) < MINIMUM:
        return None
    return Interpreter(Path(base_executable), (major, minor, micro), Path(base_prefix))


def readable_by_all(interpreter: Interpreter) -> bool:
    """Whether other users can start it and read its standard library."""
    real = interpreter.executable.resolve()
    return (
        first_closed_directory(real.parent) is None
        and first_closed_directory(interpreter.base_prefix) is None
        and real.stat().st_mode & 0o005 == 0o005
    )


def candidates() -> list[str]:
    """Return this interpreter and all others on PATH and in /usr/bin, in order of preference."""
    names = ["python3", *(f"python3.{minor}" for minor in range(MINIMUM[1], MINIMUM[1] + 5))]
    found = [sys.executable]
    for directory in [*os.environ.get("PATH", os.defpath).split(os.pathsep), "/usr/local/bin", "/usr/bin"]:
        found += [str(path) for name in names if os.access(path := Path(directory, name), os.X_OK)]
    return list(dict.fromkeys(found))


def choose(cache: Path, progress: Progress) -> Interpreter:
    """Return an interpreter that all users can start; copy this one into the cache if there is none.

    The answer is kept in the cache: an environment should not change its Python because a shell changed its PATH.
    """
    memo = cache / "python.json"
    if memo.is_file():
        kept = json.loads(memo.read_text())
        executable = Path(kept["executable"])
        version: tuple[int, int, int] = tuple(kept["version"])
        if executable.exists() and kept["modified"] == executable.stat().st_mtime_ns:
            return Interpreter(executable, version, Path(kept["base_prefix"]))
    found = [interpreter for name in candidates() if (interpreter := probe(name)) is not None]
    chosen = next(filter(readable_by_all, found), None)
    if chosen is None:
        if not found:
            raise BootstrapError(f"no Python >= {MINIMUM[0]}.{MINIMUM[1]} on PATH")
        chosen = copy(found[0], cache, progress)
    kept = {
        "executable": str(chosen.executable),
        "version": chosen.version,
        "base_prefix": str(chosen.base_prefix),
        "modified": chosen.executable.stat().st_mtime_ns,
    }
    replace_text(memo, json.dumps(kept))
    return chosen


def copy(source: Interpreter, cache: Path, progress: Progress) -> Interpreter:
    """Copy the whole installation of `source` into the cache, where all users can read it.

    Raises:
        BootstrapError: the copy does not start.
    """
    target = cache / "python" / source.version_text
    with progress.step(f"Python {source.version_text}: copied, since others may not read {source.base_prefix}"):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(
            source.base_prefix, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "test", "tests")
        )
        for path in [target, *target.rglob("*")]:
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))
        executable = target / "bin" / f"python{source.version[0]}.{source.version[1]}"
        copied = probe(str(executable))
        if copied is None or not copied.base_prefix.is_relative_to(target):
            raise BootstrapError(
                f"the copy of {source.base_prefix} in {target} does not start on its own:"
                " install Python >= 3.11 where all users can read it"
            )
    return Interpreter(executable, source.version, target)
