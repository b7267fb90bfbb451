"""The commands that a person types."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.house.tree import REPOSITORY


def test_make_explains_itself() -> None:
    """`make` alone prints every target with one line about it, and starts nothing."""
    done = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    declared = re.findall(r"^\.PHONY: (\S+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert len(declared) > 5
    for target in declared:
        assert re.search(rf"^  make {target} +\w", done.stdout, re.MULTILINE), target


def test_demo_down_removes_no_other_directory(tmp_path: Path) -> None:
    """A mistyped ROOT is refused."""
    letter = tmp_path / "letter.txt"
    letter.touch()
    done = subprocess.run(
        ["make", "demo-down", f"ROOT={tmp_path}"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{tmp_path}: there is no local cluster" in done.stderr
    assert letter.exists()


def test_images_are_built_from_both_dockerfiles() -> None:
    """`make images` names both images by REGISTRY and TAG and hands the whole checkout to BUILDER."""
    command = ["make", "images", "BUILDER=echo", "REGISTRY=registry.test/team", "TAG=7"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "build -t registry.test/team/everloop-operator:7 -f Dockerfile .",
        "build -t registry.test/team/everloop-trainer:7 -f trainer_image/Dockerfile .",
    ]


def test_ci_runs_what_people_run() -> None:
    """.ci/run ends in `make test`."""
    script = REPOSITORY / ".ci" / "run"
    assert script.read_text().splitlines()[-1] == "exec make test"
