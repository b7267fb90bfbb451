"""Adapters that are encrypted when they are written: for their holders' keys, and for nobody else."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyrage
import pytest
import torch

from everloop_trainer import peftfiles, sealing
from everloop_trainer.engine.base import BaseModel
from tests.engine.client import LORA, Engine, Refused
from tests.engine.test_export import ABOUT, SPEC, engine_logits, peft_logits, peft_model, stored

OPEN = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
SEALED = {f"{name}.age" for name in OPEN}
TOLD = {name: getattr(ABOUT, name) for name in ABOUT.__dataclass_fields__}


def ssh_key(directory: Path, kind: str) -> tuple[str, pyrage.ssh.Identity]:
    """A new key of OpenSSH: what is told to others, and what is not."""
    path = directory / f"id_{kind}"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)
    return path.with_suffix(".pub").read_text().strip(), pyrage.ssh.Identity.from_buffer(path.read_bytes())


def test_whoever_has_a_key_loads_what_was_saved(tiny_model: Path, tiny_base: BaseModel, tmp_path: Path) -> None:
    """Each recipient by itself; the logits in PEFT are the engine's, bit by bit. Nothing of it is left in the open."""
    place, own = tmp_path / "place", pyrage.x25519.Identity.generate()
    place.mkdir()
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen here")
    told, other = ssh_key(tmp_path, "ed25519")
    adapter = stored(place, tiny_base, SPEC)
    plain = {name: (place / name).read_bytes() for name in OPEN}
    written = peftfiles.seal(place / "state.safetensors", [str(own.to_public()), told])
    assert {path.name for path in place.iterdir()} == SEALED | {"state.safetensors"}
    assert peftfiles.present(place) == sorted(SEALED)
    weights = (place / "adapter_model.safetensors.age").read_bytes()
    assert (place / "state.safetensors").samefile(place / "adapter_model.safetensors.age")
    assert not any(content[:64] in weights or content[-64:] in weights for content in plain.values())
    assert written == (hashlib.sha256(weights).hexdigest(), len(weights))
    for number, identity in enumerate((own, other)):
        got = tmp_path / f"got-{number}"
        got.mkdir()
        for name in OPEN:
            pyrage.decrypt_file(str(place / f"{name}.age"), str(got / name), [identity])
        assert {name: (got / name).read_bytes() for name in OPEN} == plain
        assert torch.equal(peft_logits(peft_model(tiny_model, got)), engine_logits(tiny_base, adapter))
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(weights, [pyrage.x25519.Identity.generate()])


def test_a_write_that_fails_in_encrypting_leaves_nothing(tiny_spare: Path, tmp_path: Path) -> None:
    """No weights, at least: the whole of it is tried again at the same place, and then nothing is in the open."""
    path = tmp_path / "place" / "state.safetensors"
    blocked = path.with_name("README.md.age")
    blocked.mkdir(parents=True)
    write: dict[str, Any] = {"model": "m", "seq": 0, "path": str(path), "parts": "weights", "about": TOLD}
    write["recipients"] = [str(pyrage.x25519.Identity.generate().to_public())]
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        with pytest.raises(Refused, match=r"README.md.age"):
            engine.call("write", **write)
        assert not [each for each in path.parent.iterdir() if each.suffix == ".safetensors"]
        blocked.rmdir()
        answer, _ = engine.call("write", **write)
    assert {each.name for each in path.parent.iterdir()} == SEALED | {"state.safetensors"}
    assert answer["bytes"] == path.stat().st_size


def test_lack_of_space_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the words of the encryption alone: the save waits for space instead of failing; nothing is left."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(300_000))
    key = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(IsADirectoryError):
        sealing.seal(tmp_path, target, [key])
    assert not target.exists()

    def full(_descriptor: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sealing, "write_all", full)
    with pytest.raises(OSError, match="No space left") as lacking:
        sealing.seal(source, target, [key])
    assert lacking.value.errno == errno.ENOSPC
    assert not target.exists()
