"""The local cluster's images are those that the Dockerfiles build."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from bootstrap.images import IMAGES, Image
from tests.house.tree import REPOSITORY


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_dockerfile_and_local_image_start_alike(image: Image) -> None:
    """Entry point, command, packages, requirements and variables are the same in both."""
    lines = re.sub(r"\\\n\s*", "", image.dockerfile.read_text()).splitlines()
    instructions = [line.split(None, 1) for line in lines if line and not line.startswith("#")]

    def of(kind: str) -> list[str]:
        return [rest for name, rest in instructions if name == kind]

    assert json.loads(of("ENTRYPOINT")[0]) == list(image.entrypoint)
    assert [json.loads(command) for command in of("CMD")] == [list(image.command)] * bool(image.command)
    copied = {line.split()[0] for line in of("COPY") if not line.startswith("--from=")}
    packages = {package.relative_to(REPOSITORY).as_posix() for package in image.packages}
    assert copied == {*packages, f"requirements/{image.environment}.txt"}
    variables = dict(pair.split("=", 1) for pair in shlex.split(of("ENV")[0]))
    local = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "HOME": "/tmp", **dict(image.variables)}
    assert {name: value for name, value in variables.items() if not name.endswith("PATH")} == local
    assert of("USER") == ["1000:1000"]
    assert instructions.index(["USER", "1000:1000"]) > max(
        n for n, (kind, _) in enumerate(instructions) if kind == "RUN"
    )
