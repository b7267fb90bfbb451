"""The images: what the Dockerfiles build is what the local cluster runs, and what the pods start."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import shlex
import sys
from importlib.metadata import packages_distributions

import pytest

from bootstrap.images import IMAGES, OPERATOR_IMAGE, Image
from tests.house.test_imports import imported
from tests.house.tree import REPOSITORY, files

OPERATOR, TRAINER = sorted(IMAGES, key=lambda image: image.name != OPERATOR_IMAGE)


def instructions_of(image: Image) -> list[tuple[str, str]]:
    """The instructions of its Dockerfile in order, with continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", image.dockerfile.read_text()).splitlines()
    return [(kind, rest) for kind, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")]


def copied(image: Image) -> set[str]:
    """What its Dockerfile takes from the checkout."""
    return {rest.split()[0] for kind, rest in instructions_of(image) if kind == "COPY" and "--from=" not in rest}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_dockerfile_and_local_image_start_alike(image: Image) -> None:
    """Entry point, command, packages, requirements and variables are the same in both."""
    instructions = instructions_of(image)

    def of(kind: str) -> list[str]:
        return [rest for name, rest in instructions if name == kind]

    assert json.loads(of("ENTRYPOINT")[0]) == list(image.entrypoint)
    assert [json.loads(command) for command in of("CMD")] == [list(image.command)] * bool(image.command)
    packages = {package.relative_to(REPOSITORY).as_posix() for package in image.packages}
    assert copied(image) == {*packages, f"requirements/{image.environment}.txt"}
    variables = dict(pair.split("=", 1) for pair in shlex.split(of("ENV")[0]))
    local = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "HOME": "/tmp", **dict(image.variables)}
    assert {name: value for name, value in variables.items() if not name.endswith("PATH")} == local
    assert of("USER") == ["1000:1000"]
    assert instructions.index(("USER", "1000:1000")) > max(
        n for n, (kind, _) in enumerate(instructions) if kind == "RUN"
    )


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_final_stage_holds_no_build_tools(image: Image) -> None:
    """It has the base image of the first stage, takes everything from that stage, installs nothing and removes pip."""
    instructions = instructions_of(image)
    first, last = [n for n, (kind, _) in enumerate(instructions) if kind == "FROM"]
    assert instructions[first][1] == f"{instructions[last][1]} AS packages"
    final = instructions[last + 1 :]
    assert all(rest.startswith("--from=packages ") for kind, rest in final if kind in ("COPY", "ADD"))
    [run] = [rest for kind, rest in final if kind == "RUN"]
    assert "pip uninstall --yes --root-user-action ignore setuptools wheel pip" in run
    assert not re.search(r"\b(apt|apt-get|install|gcc|build-essential)\b", run)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_builder_is_given_what_is_copied_and_no_more(image: Image) -> None:
    """.dockerignore leaves out everything but what the Dockerfiles copy; what they copy exists."""
    nothing, *rest = [
        line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert nothing == "*"
    given = [line.removeprefix("!") for line in rest if line.startswith("!")]
    for source in copied(image):
        assert (REPOSITORY / source).exists(), source
        assert any(fnmatch.fnmatchcase(source, pattern) for pattern in given), source
    everything = copied(OPERATOR) | copied(TRAINER)
    for pattern in given:
        assert any(fnmatch.fnmatchcase(source, pattern) for source in everything), pattern


def test_pods_start_modules_of_the_operator_image() -> None:
    """Each module that the chart, its notes or the operator start with `-m` is copied, and can be started."""
    places = [*files("helm"), *files("operator", suffix=".py")]
    modules = {name for path in places for name in re.findall(r'-m[", ]+(everloop_\w+)', path.read_text())}
    assert modules == {"everloop_gateway", "everloop_operator", "everloop_progress"}
    startable = {package.name for package in OPERATOR.packages if (package / "__main__.py").is_file()}
    assert modules <= startable


def test_pods_start_roles_of_the_trainer_image() -> None:
    """Each role that the Dockerfile, the operator or a role itself starts is one of the trainer's."""
    main = REPOSITORY / "trainer_image" / "everloop_trainer" / "__main__.py"
    known = {
        pattern.patterns[0].value.value
        for pattern in ast.walk(ast.parse(main.read_text()))
        if isinstance(pattern, ast.MatchSequence)
        and isinstance(pattern.patterns[0], ast.MatchValue)
        and isinstance(pattern.patterns[0].value, ast.Constant)
    }
    operators = "".join(path.read_text() for path in files("operator", suffix=".py"))
    started = {*TRAINER.command, *re.findall(r'"args": \["(\w+)"', operators)}
    assert started == {"supervisor", "fetch"}
    assert started <= known


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_everything_that_is_imported_is_installed(image: Image) -> None:
    """Each import of a copied package is the standard library's, a copied package or in the requirements."""
    pinned = re.findall(
        r"^([\w.-]+)==", (REPOSITORY / f"requirements/{image.environment}.txt").read_text(), re.MULTILINE
    )
    own = {package.name for package in image.packages}
    distributions = packages_distributions()
    # No pod converts weights: that is done on a machine of one's own, with requirements/weights.txt.
    converter = REPOSITORY / "trainer_image" / "everloop_trainer" / "weights.py"
    sources = [path for package in image.packages for path in package.rglob("*.py") if path != converter]
    for name in set().union(*(imported(path) for path in sources)) - own - sys.stdlib_module_names:
        assert {_normal(each) for each in distributions[name]} & set(map(_normal, pinned)), name


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
