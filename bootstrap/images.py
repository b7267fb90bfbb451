"""The local cluster's images: containers there are processes, so an image is a directory, a PATH and an entry point."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bootstrap.environments import Environments
from bootstrap.layout import REPOSITORY, content_hash, is_complete, mark_complete, replace_text, source_files
from bootstrap.progress import Progress

OPERATOR_IMAGE = "everloop-operator:dev"
TRAINER_IMAGE = "everloop-trainer:dev"


@dataclass(frozen=True, slots=True)
class Image:
    """What its Dockerfile would build: packages, the environment below them, how it starts."""

    name: str
    dockerfile: Path
    packages: tuple[Path, ...]
    environment: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


_SHARED = tuple(REPOSITORY / "trainer_image" / f"everloop_{name}" for name in ("http", "losses"))

IMAGES = (
    Image(
        OPERATOR_IMAGE,
        REPOSITORY / "Dockerfile",
        (
            *(REPOSITORY / "operator" / f"everloop_{name}" for name in ("operator", "gateway", "metrics", "progress")),
            *_SHARED,
        ),
        "operator",
        ("python",),
        (),
    ),
    Image(
        TRAINER_IMAGE,
        REPOSITORY / "trainer_image" / "Dockerfile",
        (REPOSITORY / "trainer_image" / "everloop_trainer", *_SHARED),
        "trainer",
        ("python", "-m", "everloop_trainer"),
        ("supervisor",),
        (("HF_HUB_OFFLINE", "1"),),
    ),
)


def directory(cache: Path, image: Image) -> Path:
    """Return where the packages of `image` lie; the name changes with their content."""
    return cache / "images" / f"{image.name.partition(':')[0]}-{content_hash(image.packages)}"


def images_file(environments: Environments) -> Path:
    """Return the file that tells the local cluster what the image names of the present sources stand for."""
    text = _text(environments)
    return environments.cache / "images" / f"images-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def ensure(environments: Environments, progress: Progress) -> Path:
    """Copy the packages of each image into the cache, where uid 1000 can read them, and return `images_file`."""
    for image in IMAGES:
        root = directory(environments.cache, image)
        if not is_complete(root):
            shutil.rmtree(root, ignore_errors=True)
            for package in image.packages:
                for source in source_files(package):
                    target = root / source.relative_to(package.parent)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)
            # Containers cannot write byte code, and starting without it costs each of them seconds.
            python = environments.ensure(image.environment, progress) / "bin" / "python"
            subprocess.run([str(python), "-m", "compileall", "-q", "-j", "0", str(root)], check=True)
            mark_complete(root)
    target = images_file(environments)
    if not target.is_file():
        replace_text(target, _text(environments))
    return target


def _text(environments: Environments) -> str:
    return json.dumps([_entry(image, environments) for image in IMAGES], indent=1) + "\n"


def _entry(image: Image, environments: Environments) -> dict[str, object]:
    root = directory(environments.cache, image)
    return {
        "match": image.name,
        "path": [str(environments.directory(image.environment) / "bin")],
        "env": {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(root),
            "HOME": "/tmp",  # noqa: S108 - the pods mount an emptyDir there
            **dict(image.variables),
        },
        "entrypoint": list(image.entrypoint),
        "cmd": list(image.command),
        "cwd": str(root),
    }
