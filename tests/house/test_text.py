"""What the files of the repository may look like."""

from __future__ import annotations

import ast
import re

import pytest

from bootstrap.environments import NAMES
from tests.house.tree import CODE, REPOSITORY, files, shown

LONGEST_FILE = 500
NOT_WRITTEN_HERE = ("LICENSE", "go.sum", "crds/", "helm/everloop/crds-src/", "examples/sonnets.txt")


def test_no_file_is_long() -> None:
    """A file of more than 500 lines holds more than one thing."""
    for path in files():
        name = shown(path)
        if name.endswith(NOT_WRITTEN_HERE) or name.startswith(NOT_WRITTEN_HERE) or name.startswith("requirements/"):
            continue
        assert len(path.read_text().splitlines()) <= LONGEST_FILE, name


def test_the_project_speaks_only_of_itself() -> None:
    """No directory of somebody's machine and no address of a package registry stands in any file."""
    places = [rf"(?<![\w.])/{top}/" for top in ("work", "root", "home")]
    registries = {"pypi": "org", "files.pythonhosted": "org", "proxy.golang": "org", "deb.debian": "org"}
    hosts = [rf"\b{re.escape(host)}\.{top}\b" for host, top in registries.items()]
    foreign = re.compile("|".join(places + hosts))
    for path in files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = foreign.search(line)
            assert found is None, f"{shown(path)}:{number}: {line.strip()}"


def test_no_server_listens_on_all_addresses() -> None:
    """Servers bind the pod's own address."""
    everywhere = re.compile(r"\b0\.0\.0\.0\b|[\"']::[\"']")
    for path in files(*CODE, "helm"):
        assert not everywhere.search(path.read_text()), shown(path)


def test_code_is_ascii() -> None:
    """What runs is written in ASCII."""
    for path in files(*CODE, suffix=".py"):
        assert path.read_text().isascii(), shown(path)


def test_every_test_says_what_it_is_for() -> None:
    """A test has a docstring."""
    for path in files("tests", suffix=".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                assert ast.get_docstring(node), f"{shown(path)}: {node.name}"


def test_relative_links_lead_somewhere() -> None:
    """Every link of a document to a file of the repository finds it."""
    for path in files(suffix=".md"):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{shown(path)}: {target}"


def test_paths_in_the_architecture_exist() -> None:
    """Every file or directory that docs/architecture.md names in backticks is there."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = [
        name for name in re.findall(r"`([\w./-]+)`", text) if name.split("/")[0] in (*CODE, "crds", "helm", "tests")
    ]
    assert len(named) > 20
    assert not [name for name in named if "/" in name and not (REPOSITORY / name).exists()]


@pytest.mark.parametrize("name", [*NAMES, "uv", "weights"])
def test_requirements_are_pinned(name: str) -> None:
    """Each package has one exact version with hashes, each package asked for is among them, and no address is."""
    pinned = (REPOSITORY / "requirements" / f"{name}.txt").read_text()
    assert "://" not in pinned
    assert "--index-url" not in pinned
    packages = re.split(r"\n(?=\S)", pinned.strip())
    for package in packages:
        assert re.match(r"[a-z0-9._-]+(\[[a-z,]+\])?==\S+", package), package
        assert "--hash=sha256:" in package, package
    names = {re.split(r"[=\[]", package)[0] for package in packages}
    for line in (REPOSITORY / "requirements" / f"{name}.in").read_text().splitlines():
        if line and not line.startswith(("#", "-r")):
            assert re.split(r"[=<>~\[]", line)[0].strip().lower() in names, line
