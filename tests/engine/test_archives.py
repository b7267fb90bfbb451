"""Checkpoints as archives for older SDKs: PEFT loads what is in one, whatever range of it was read at a time."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from everloop_trainer import archives
from everloop_trainer.engine import state
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.lora import Adapter
from tests.engine.reference import randomise
from tests.engine.test_export import ABOUT, SPEC, engine_logits, peft_logits, peft_model, stored

Make = Callable[[Path, BaseModel], Adapter]


def trained(directory: Path, base: BaseModel) -> Adapter:
    """An adapter in a training checkpoint, gradients and optimizer beside it."""
    adapter = Adapter(SPEC, base.targets)
    adapter.initialise()
    randomise(adapter)
    vector = adapter.flat.detach().numpy()
    groups = {"weights": vector, "adam.exp_avg": vector + 1, "adam.exp_avg_sq": vector + 2, "grad": vector + 3}
    state.write_state(directory / "state.safetensors", state.StateFile(SPEC, adapter.entries, 9, 4, groups))
    return adapter


@pytest.mark.parametrize("make", [trained, partial(stored, spec=SPEC)], ids=["training", "sampler"])
def test_peft_loads_what_is_in_an_archive(tiny_model: Path, tiny_base: BaseModel, tmp_path: Path, make: Make) -> None:
    """The engine's logits, bit by bit; nothing of the optimizer is in it."""
    adapter = make(tmp_path, tiny_base)
    parts = archives.archive(tmp_path / "state.safetensors", ABOUT)
    whole = b"".join(archives.read(parts, 0, archives.size(parts)))
    assert len(whole) == archives.size(parts)
    got = tmp_path / "got"
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        assert [member.name for member in tar if member.isreg()] == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "README.md",
            "checkpoint_complete",
        ]
        tar.extractall(got)
    weights = (got / "adapter_model.safetensors").stat().st_size
    assert 0 < weights - adapter.flat.numel() * 4 < 100_000
    assert torch.equal(peft_logits(peft_model(tiny_model, got)), engine_logits(tiny_base, adapter))
    for start, end in ((0, 1), (500, 530), (511, 20_000), (len(whole) - 1500, len(whole))):
        assert b"".join(archives.read(parts, start, end)) == whole[start:end]


def test_what_is_no_adapter_is_no_archive(tmp_path: Path) -> None:
    """An encrypted file, and one that got shorter while it was read."""
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"age-encryption.org/v1\n" + bytes(100))
    with pytest.raises(archives.NoAdapter):
        archives.archive(path, ABOUT)
    with pytest.raises(EOFError):
        list(archives.read([archives.Part(1000, path=path)], 0, 1000))
