"""Images: names only, and what is configured for a name."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Image:
    """What containers of an image get; the file system is the host's."""

    match: str
    """Glob over image names; the first entry that matches counts."""
    path: list[str] = field(default_factory=list)
    """Directories in front of PATH."""
    env: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    cwd: str = "/"
    uid: int = 0
    """User when the pod names none."""
    pull_error: str = ""
    """The image can't be pulled, with this message."""


def parse_images(text: str) -> list[Image]:
    """Read a JSON list of images.

    Raises:
        ValueError: an entry or a field is not what it should be; the message names it.
    """
    entries = json.loads(text)
    if not isinstance(entries, list):
        raise ValueError("images: not a list")
    return [_parse(entry, f"images[{i}]") for i, entry in enumerate(entries)]


def _parse(entry: Any, where: str) -> Image:
    known = {f.name: f for f in fields(Image)}
    if not isinstance(entry, dict) or "match" not in entry:
        raise ValueError(f"{where}: not an object with a field 'match'")
    for key, value in entry.items():
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown field; known are {', '.join(known)}")
        if not isinstance(value, _kind(key)):
            raise ValueError(f"{where}.{key}: {value!r} is not a {_kind(key).__name__}")
    return Image(**entry)


def _kind(name: str) -> type:
    if name == "uid":
        return int
    if name == "env":
        return dict
    return list if name in ("path", "entrypoint", "cmd") else str


class Images:
    """The images of a cluster, read anew at every use, so that the file can be changed while the cluster runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getitem__(self, name: str) -> Image:
        """Return what is configured for a name; an image nobody configured exists and adds nothing."""
        for image in parse_images(self._path.read_text()):
            if fnmatch.fnmatchcase(name, image.match):
                return image
        return Image(name)
