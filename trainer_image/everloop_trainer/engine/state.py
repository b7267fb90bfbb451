"""State files: safetensors with everything that one model's training goes on from, written once and never changed.

Tensors (all float32), <key> being PEFT's name: in a file of weights alone (format 2) `<key>`, so that PEFT reads it
too; in one with all parts (format 1) `weights/<key>`, `adam.exp_avg/<key>`, `adam.exp_avg_sq/<key>`, and `grad/<key>`
if gradients are outstanding. Files of weights alone used to have format 1 as well, and are read. Metadata: format,
seq, step, lora. Equal states give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from typing_extensions import Buffer

from everloop_trainer.durable import write_file
from everloop_trainer.engine.errors import StateError
from everloop_trainer.engine.lora import Entry, LoraSpec
from everloop_trainer.peftfiles import WEIGHTS_FORMAT

FORMAT = "1"
FILE_MODE = 0o600
Parts = Literal["all", "weights"]
Vector = NDArray[np.float32]
_REQUIRED: dict[Parts, tuple[str, ...]] = {
    "all": ("weights", "adam.exp_avg", "adam.exp_avg_sq"),
    "weights": ("weights",),
}


@dataclass(frozen=True, slots=True)
class StateFile:
    """Contents of a state file: flat vectors by group name, in the layout of `entries`."""

    lora: LoraSpec
    entries: Sequence[Entry]
    seq: int
    step: int
    groups: Mapping[str, Vector]


@dataclass(frozen=True, slots=True)
class Written:
    """SHA-256 (hex) and size in bytes of a file that is safely stored."""

    sha256: str
    bytes: int


def write_state(path: Path, state: StateFile) -> Written:
    """Write `state` to the new file `path`, flushed together with every directory made for it.

    Raises FileExistsError if there is such a file, and OSError if storage fails; no partial file is left behind.
    """
    return Written(*write_file(path, _parts(state), FILE_MODE))


def read_lora(path: Path) -> LoraSpec:
    """Read the shape of the adapter in a state file. Raises StateError or OSError."""
    return _lora(path, _metadata(path))


def read_state(path: Path, entries: Sequence[Entry], parts: Parts) -> StateFile:
    """Read a state file whose adapter is laid out as `entries`; with parts "weights", only the group weights.

    Raises StateError if it holds anything else, OSError if it cannot be read.
    """
    metadata = _metadata(path)
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            form = metadata["format"]
            groups = _groups(path, names, entries, parts, form)
            vectors = {group: np.empty(entries[-1].stop, np.float32) for group in groups}
            for group, vector in vectors.items():
                for entry in entries:
                    name = _name(group, entry, form)
                    tensor = file.get_tensor(name)
                    if tensor.dtype != np.float32 or tensor.shape != entry.shape:
                        raise StateError(f"{path}: {name} is {tensor.dtype}{tensor.shape}")
                    vector[entry.start : entry.stop] = tensor.reshape(-1)
    except SafetensorError as error:
        raise StateError(f"{path}: not a state file: {error}") from error
    return StateFile(_lora(path, metadata), entries, int(metadata["seq"]), int(metadata["step"]), vectors)


def file_sha256(path: Path) -> str:
    """Hash a file without reading it into memory at once. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parts(state: StateFile) -> Iterator[Buffer]:
    yield _header(state)
    for name in sorted(state.groups):
        yield state.groups[name].data


def _header(state: StateFile) -> bytes:
    """Build the safetensors header: u64 LE length, then JSON padded so that the data starts at a multiple of 8."""
    form = WEIGHTS_FORMAT if state.groups.keys() == {"weights"} else FORMAT
    table: dict[str, object] = {
        "__metadata__": {
            "format": form,
            "lora": json.dumps(asdict(state.lora), sort_keys=True),
            "seq": str(state.seq),
            "step": str(state.step),
        }
    }
    start = 0
    for group in sorted(state.groups):
        for entry in state.entries:
            offsets = [start + 4 * entry.start, start + 4 * entry.stop]
            table[_name(group, entry, form)] = {"dtype": "F32", "shape": entry.shape, "data_offsets": offsets}
        start += state.groups[group].nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _name(group: str, entry: Entry, form: str) -> str:
    return entry.key if form == WEIGHTS_FORMAT else f"{group}/{entry.key}"


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise StateError(f"{path}: not a state file: {error}") from error
    if metadata.get("format") not in (FORMAT, WEIGHTS_FORMAT):
        raise StateError(
            f"{path}: format {metadata.get('format')!r} is unknown, expected {FORMAT!r} or {WEIGHTS_FORMAT!r}"
        )
    return dict(metadata)


def _lora(path: Path, metadata: Mapping[str, str]) -> LoraSpec:
    try:
        return LoraSpec(**json.loads(metadata["lora"]))
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path}: metadata lora is unusable: {error!r}") from error


def _groups(path: Path, names: set[str], entries: Sequence[Entry], parts: Parts, form: str) -> list[str]:
    groups = list(_REQUIRED[parts])
    if parts == "all" and form != FORMAT:
        raise StateError(f"{path}: holds weights alone")
    if parts == "all" and any(name.startswith("grad/") for name in names):
        groups.append("grad")
    expected = {_name(group, entry, form) for group in groups for entry in entries}
    extra = sorted(names - expected) if parts == "all" else []
    missing = sorted(expected - names)
    if missing or extra:
        first = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which this adapter has not"
        raise StateError(f"{path}: {first}")
    return groups
