"""Reads saved adapters as bytes, to compare two of them without torch."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a safetensors file: its dtype name, shape and raw little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_tensors(path: Path, prefix: str = "weights/") -> dict[str, Tensor]:
    """The tensors of a safetensors file whose names start with ``prefix``, by name without it.

    Format: https://github.com/huggingface/safetensors#format (8-byte little-endian header
    length, JSON header, data).

    Raises:
        ValueError: the file is shorter than its header says.
    """
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if not name.startswith(prefix):
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if end > len(raw):
            raise ValueError(f"{path}: tensor {name} ends at byte {end} of {len(raw)}")
        tensors[name.removeprefix(prefix)] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[begin:end])
    return tensors


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over sorted name, dtype, shape and bytes: equal exactly for bit-equal adapters."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{','.join(map(str, tensor.shape))}|{len(tensor.data)}|".encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def checkpoint_file(lineage_root: Path, tinker_path: str) -> Path:
    """The data file of a checkpoint on the session's volume.

    Args:
        lineage_root: ``<volume>/<namespace>/<TrainingSession>``.
        tinker_path: ``tinker://<model_id>/<kind>/<name>``.

    Raises:
        FileNotFoundError: no manifest on the volume names this checkpoint.
    """
    model_id, kind, name = tinker_path.removeprefix("tinker://").split("/")
    model_dir = lineage_root / "models" / ("m-" + hashlib.sha256(model_id.encode()).hexdigest()[:12])
    for manifest in sorted((model_dir / "checkpoints" / kind).glob("*/manifest.json"), reverse=True):
        if json.loads(manifest.read_text()).get("name") == name:
            return manifest.with_name("state.safetensors")
    raise FileNotFoundError(f"no manifest under {model_dir} names {tinker_path}")
