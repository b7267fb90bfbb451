"""Which Python the environments stand on."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from bootstrap import interpreter
from bootstrap.interpreter import Interpreter
from bootstrap.progress import Progress


def test_probe_sees_through_an_environment() -> None:
    """A virtual environment's Python is traced to the installation that it stands on."""
    assert sys.prefix != sys.base_prefix
    found = interpreter.probe(sys.executable)
    assert found is not None
    assert found.base_prefix == Path(sys.base_prefix)
    assert found.version == sys.version_info[:3]
    assert not found.executable.is_relative_to(sys.prefix)


def test_probe_refuses_what_does_not_start(tmp_path: Path) -> None:
    """A program that is no Python is no candidate."""
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert interpreter.probe(str(broken)) is None


def test_python_in_a_closed_home_is_passed_over(tmp_path: Path) -> None:
    """One that lies below a directory of mode 0700 cannot be started by the containers' user."""
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    executable = home / "bin" / "python3"
    shutil.copyfile("/bin/true", executable)
    executable.chmod(0o755)
    for directory in [tmp_path, *tmp_path.parents]:
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(0o755)
    python = Interpreter(executable, (3, 11, 0), home)
    assert interpreter.readable_by_all(python)
    home.chmod(0o700)
    assert not interpreter.readable_by_all(python)


def test_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell with another PATH gets the Python that the environments were built on."""
    first = interpreter.choose(tmp_path, Progress(tmp_path))
    monkeypatch.setattr(interpreter, "candidates", list)
    assert interpreter.choose(tmp_path, Progress(tmp_path)) == first


def test_a_closed_python_is_copied(tmp_path: Path) -> None:
    """Where every Python is closed to others, the installation is copied into the cache, open, and starts there."""
    found = interpreter.probe(sys.executable)
    assert found is not None
    small = tmp_path / "installation"
    _installation(found, small)
    small.chmod(0o700)
    source = interpreter.probe(str(small / "bin" / found.executable.resolve().name))
    assert source is not None
    assert source.base_prefix == small
    copied = interpreter.copy(source, tmp_path / "cache", Progress(tmp_path / "cache"))
    assert copied.base_prefix.is_relative_to(tmp_path / "cache")
    assert copied.executable.stat().st_mode & 0o005 == 0o005
    assert all(path.stat().st_mode & 0o004 for path in copied.base_prefix.rglob("*.py"))


def _installation(python: Interpreter, target: Path) -> None:
    """Lay out a relocatable Python: the binary and its standard library."""
    name = f"python{python.version[0]}.{python.version[1]}"
    (target / "bin").mkdir(parents=True)
    shutil.copy2(python.executable.resolve(), target / "bin" / python.executable.resolve().name)
    ignored = shutil.ignore_patterns("__pycache__", "test", "idlelib", "site-packages", "dist-packages", "config-*")
    shutil.copytree(python.base_prefix / "lib" / name, target / "lib" / name, ignore=ignored)
