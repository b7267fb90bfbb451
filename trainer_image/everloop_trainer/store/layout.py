"""Names of files under a session's root. Pure."""

from __future__ import annotations

IDENTITY = "identity.json"
EPOCHS = "epochs"
JOURNAL = "journal"
PROBE = "probe"
STATE = "state.safetensors"
MANIFEST = "manifest.json"


def epoch(number: int) -> str:
    """The file by whose creation an incarnation is claimed."""
    return f"{EPOCHS}/{number:08d}.json"


def journal(number: int) -> str:
    """The journal that only incarnation `number` appends to."""
    return f"{JOURNAL}/{number:08d}.log"


def states(storage_id: str, kind: str) -> str:
    """The directory of a model's snapshots or of one kind of its checkpoints."""
    return f"models/{storage_id}/snapshots" if kind == "snapshots" else f"models/{storage_id}/checkpoints/{kind}"


def state(storage_id: str, kind: str, key: str) -> str:
    """The directory of one stored state."""
    return f"{states(storage_id, kind)}/{key}"
