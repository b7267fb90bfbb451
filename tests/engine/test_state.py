"""State files: complete or absent, never overwritten, readable by safetensors."""

from __future__ import annotations

import hashlib
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from everloop_trainer.engine import state
from everloop_trainer.engine.errors import StateError
from everloop_trainer.engine.lora import Entry, LoraSpec

SPEC = LoraSpec(rank=2, seed=1, train_mlp=False, train_attn=False, train_unembed=True)
ENTRIES = (Entry("lm_head.lora_A.weight", (2, 3), 0), Entry("lm_head.lora_B.weight", (5, 2), 6))


def _state(*groups: str) -> state.StateFile:
    vectors = {name: np.arange(16, dtype=np.float32) + index / 8 for index, name in enumerate(groups)}
    return state.StateFile(SPEC, ENTRIES, 7, 3, vectors)


ALL = _state("weights", "adam.exp_avg", "adam.exp_avg_sq", "grad")


def test_round_trip(tmp_path: Path) -> None:
    """What is written is read back bit by bit; hash and size are those of the file; parents are made."""
    path = tmp_path / "a" / "b" / "state.safetensors"
    written = state.write_state(path, ALL)
    content = path.read_bytes()
    assert written == state.Written(hashlib.sha256(content).hexdigest(), len(content))
    assert state.file_sha256(path) == written.sha256
    found = state.read_state(path, ENTRIES, "all")
    assert (found.lora, found.seq, found.step) == (SPEC, 7, 3)
    assert found.groups.keys() == ALL.groups.keys()
    assert all(np.array_equal(found.groups[name], ALL.groups[name]) for name in ALL.groups)
    assert state.read_state(path, ENTRIES, "weights").groups.keys() == {"weights"}


def test_library_reads_it(tmp_path: Path) -> None:
    """Safetensors itself finds every tensor under its documented name, aligned to 8 bytes."""
    state.write_state(tmp_path / "state", ALL)
    tensors = load_file(tmp_path / "state")
    assert sorted(tensors) == sorted(f"{group}/{entry.key}" for group in ALL.groups for entry in ENTRIES)
    assert np.array_equal(tensors["grad/lm_head.lora_B.weight"], ALL.groups["grad"][6:].reshape(5, 2))
    assert int.from_bytes((tmp_path / "state").read_bytes()[:8], "little") % 8 == 0


def test_weights_alone_have_the_names_of_peft(tmp_path: Path) -> None:
    """No group stands before them, and they are read back; so are those that an earlier version wrote with one."""
    path = tmp_path / "state"
    state.write_state(path, _state("weights"))
    tensors = load_file(path)
    assert sorted(tensors) == sorted(entry.key for entry in ENTRIES)
    found = state.read_state(path, ENTRIES, "weights")
    assert np.array_equal(found.groups["weights"], ALL.groups["weights"])

    with safe_open(path, framework="numpy") as file:
        metadata = {**file.metadata(), "format": "1"}
    save_file({f"weights/{name}": tensor for name, tensor in tensors.items()}, tmp_path / "earlier", metadata=metadata)
    earlier = state.read_state(tmp_path / "earlier", ENTRIES, "weights")
    assert np.array_equal(earlier.groups["weights"], ALL.groups["weights"])
    assert (earlier.lora, earlier.seq, earlier.step) == (found.lora, found.seq, found.step)


def test_existing_file_is_kept(tmp_path: Path) -> None:
    """A file that is there is refused and keeps its content."""
    path = tmp_path / "state"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        state.write_state(path, ALL)
    assert path.read_bytes() == b"precious"


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """When storage ends in the middle, the error is raised and no partial file stays."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            state.write_state(tmp_path / "state", ALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    """No safetensors, another format, missing moments, or another adapter: each is named."""
    path = tmp_path / "junk"
    path.write_bytes(b"junk" * 100)
    with pytest.raises(StateError, match="not a state file"):
        state.read_state(path, ENTRIES, "all")
    path = tmp_path / "format"
    save_file({"weights/x": np.zeros(1, np.float32)}, path, metadata={"format": "3"})
    with pytest.raises(StateError, match="format '3' is unknown"):
        state.read_state(path, ENTRIES, "all")
    path = tmp_path / "weights"
    state.write_state(path, _state("weights"))
    with pytest.raises(StateError, match="holds weights alone"):
        state.read_state(path, ENTRIES, "all")
    path = tmp_path / "without moments"
    state.write_state(path, _state("weights", "grad"))
    with pytest.raises(StateError, match=r"lacks adam\.exp_avg/lm_head"):
        state.read_state(path, ENTRIES, "all")
    path = tmp_path / "whole"
    state.write_state(path, ALL)
    with pytest.raises(StateError, match="lm_head"):
        state.read_state(path, [replace(ENTRIES[0], shape=(3, 2)), ENTRIES[1]], "all")
    with pytest.raises(StateError, match="which this adapter has not"):
        state.read_state(path, ENTRIES[:1], "all")
