"""Who may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import REPOSITORY, files, shown

PYTHONPATH = f"{REPOSITORY / 'operator'}:{REPOSITORY / 'trainer_image'}:{REPOSITORY}"


def test_storeys_are_kept() -> None:
    """import-linter's contracts in pyproject.toml hold."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_operator_directory_is_no_package() -> None:
    """A package named operator would shadow the standard library's module."""
    assert not (REPOSITORY / "operator" / "__init__.py").exists()


@pytest.mark.parametrize("module", ["everloop_trainer.server.app", "everloop_trainer.supervisor"])
def test_serving_side_starts_without_torch(module: str) -> None:
    """Server and supervisor load neither torch nor what would import it, so that they start in milliseconds."""
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, check=True
    )
    assert "everloop_trainer" in done.stdout.split()
    assert not {"torch", "transformers", "peft", "tinker", "numpy"} & set(done.stdout.split())


def test_bootstrap_stands_on_the_standard_library() -> None:
    """What prepares a fresh machine runs there: it imports nothing that has to be installed."""
    sources = [*files("bootstrap", suffix=".py"), REPOSITORY / "devcluster" / "build.py"]
    allowed = {*sys.stdlib_module_names, "bootstrap"}
    for path in sources:
        for module in imported(path):
            local = module == "devcluster" and path.name != "build.py"
            assert module in allowed or local, f"{shown(path)} imports {module}"
    assert not imported(REPOSITORY / "devcluster" / "__init__.py")


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found.add(node.module.partition(".")[0])
    return found
