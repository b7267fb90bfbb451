"""Names of files under a session's root. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

IDENTITY = "identity.json"
RESTORED = "restored.json"
EPOCHS = "epochs"
JOURNAL = "journal"
PROBE = "probe"
STATE = "state.safetensors"
MANIFEST = "manifest.json"


def epoch(number: int) -> str:
    """The file by whose creation an incarnation is claimed."""
    return f"{EPOCHS}/{number:08d}.json"


class Cut(NamedTuple):
    """A place between the files of a journal: before segment `segment` of incarnation `incarnation`."""

    incarnation: int
    segment: int


_JOURNAL_FILE = re.compile(r"(\d{8})(?:-(\d{4,}))?\.(log|base)")


def journal(number: int, segment: int = 0) -> str:
    """A file of the journal that only incarnation `number` appends to; it may have several, one after another."""
    return f"{JOURNAL}/{number:08d}-{segment:04d}.log" if segment else f"{JOURNAL}/{number:08d}.log"


def base(before: Cut) -> str:
    """The file that stands for every journal file before that place."""
    return f"{JOURNAL}/{before.incarnation:08d}-{before.segment:04d}.base"


def journal_file(name: str) -> tuple[Cut, bool] | None:
    """Which file of the journal directory a name is, and whether it is a base; None if it is neither."""
    match = _JOURNAL_FILE.fullmatch(name)
    return None if match is None else (Cut(int(match[1]), int(match[2] or 0)), match[3] == "base")


def states(storage_id: str, kind: str) -> str:
    """The directory of a model's snapshots or of one kind of its checkpoints."""
    return f"models/{storage_id}/snapshots" if kind == "snapshots" else f"models/{storage_id}/checkpoints/{kind}"


def state(storage_id: str, kind: str, key: str) -> str:
    """The directory of one stored state."""
    return f"{states(storage_id, kind)}/{key}"
