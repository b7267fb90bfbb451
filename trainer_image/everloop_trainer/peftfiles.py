"""The files that make a stored adapter a PEFT one, beside its weights: configuration and model card.

PEFT finds `adapter_config.json` and `adapter_model.safetensors` in a directory. The latter is a second name of the
state file: a file of weights alone keeps them under PEFT's names already. Nothing of torch is used, since processes
without it complete directories too.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from everloop_trainer import sealing
from everloop_trainer.about import ALPHA, About
from everloop_trainer.durable import sync_directory, write_file

WEIGHTS_FORMAT = "2"
"""`format` in the metadata of a state file that holds weights alone, each under PEFT's name of it."""
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
CARD = "README.md"
NAMES = (CONFIG, WEIGHTS, CARD)
"""Every file that a PEFT directory here has."""
LOADER, SEEING_LOADER = "AutoModelForCausalLM", "AutoModelForImageTextToText"
"""What transformers loads a base model of text with, and one that takes images."""
FILE_MODE = 0o600
_LANGUAGE_PART = ".language_model."
"""In the names of the modules of a model that has other parts beside it, which see."""
_LONGEST_HEADER = 100_000_000  # bytes; that of the format


def complete(state: Path, about: About) -> bool:
    """Make the directory of a state file one that PEFT loads; returns whether the file can be PEFT's.

    It can not if it holds more than weights, or is of the format before. What is there is replaced by the same.
    Raises OSError.
    """
    header, _ = read_header(state) or ({}, 0)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, Mapping) or metadata.get("format") != WEIGHTS_FORMAT:
        return False
    for name, content in companions(about, header, metadata).items():
        _place(state.with_name(name), content)
    _link(state, state.with_name(WEIGHTS))
    sync_directory(state.parent)
    return True


def companions(about: About, tensors: Collection[str], metadata: Mapping[str, str]) -> dict[str, bytes]:
    """What lies beside the weights of an adapter, by file name.

    Args:
        about: where it is from.
        tensors: names of its weights.
        metadata: of its state file.
    """
    modules, rank = module_names(tensors), int(json.loads(metadata["lora"])["rank"])
    sees = any(_LANGUAGE_PART in name for name in tensors)
    return {
        CONFIG: adapter_config(about, rank, modules),
        CARD: model_card(about, rank, modules, int(metadata["step"]), sees=sees),
    }


def seal(state: Path, recipients: Sequence[str]) -> tuple[str, int]:
    """Encrypt a directory that `complete` made: each file gets age's suffix, and what anybody could read goes.

    Returns SHA-256 (hex) and size in bytes of the state file, which is the encrypted weights from now on. What is
    there of an earlier try is replaced. Raises BadRecipient, OSError.
    """
    for name in (CONFIG, CARD):
        plain = state.with_name(name)
        _seal(plain, plain.with_name(name + sealing.SUFFIX), recipients)
        plain.unlink()
    sealed = _seal(state, state, recipients)
    state.with_name(WEIGHTS).unlink()
    _link(state, state.with_name(WEIGHTS + sealing.SUFFIX))
    sync_directory(state.parent)
    return sealed


def remove(state: Path) -> None:
    """Take back a state file and its second name; `complete` and `seal` replace the others. Raises OSError."""
    for path in (state, state.with_name(WEIGHTS)):
        path.unlink(missing_ok=True)


def present(directory: Path) -> list[str]:
    """The names of a PEFT directory's files, encrypted or not. Raises OSError."""
    names = {path.name for path in directory.iterdir()}
    return sorted(names & {each for name in NAMES for each in (name, name + sealing.SUFFIX)})


def module_names(keys: Iterable[str]) -> list[str]:
    """The last names of the modules that carry an adapter, sorted, from PEFT's names of the tensors. Pure."""
    return sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in keys})


def adapter_config(about: About, rank: int, modules: Sequence[str]) -> bytes:
    """The content of `adapter_config.json`. Pure."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": about.base_model,
        "revision": about.revision or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }
    return json.dumps(config, indent=2).encode() + b"\n"


def model_card(about: About, rank: int, modules: Sequence[str], step: int, *, sees: bool = False) -> bytes:
    """The content of `README.md`, with the front matter that model hubs read; `sees`: the base model does. Pure.

    What users say of a checkpoint (`user_metadata`) is not in it: a card is passed on more freely than that may be.
    """
    base = json.dumps(about.base_model)  # which is a string of YAML too, on one line
    revision = f", revision {json.dumps(about.revision)}" if about.revision else ""
    task, loader = ("image-text-to-text", SEEING_LOADER) if sees else ("text-generation", LOADER)
    lines = [
        "---",
        f"base_model: {base}",
        "library_name: peft",
        f"pipeline_tag: {task}",
        "tags:",
        "- lora",
        "---",
        "",
        f"# {about.checkpoint}",
        "",
        f"A LoRA adapter for {base}{revision}, trained with Everloop.",
        "",
        "| | |",
        "|---|---|",
        f"| rank | {rank} |",
        f"| alpha | {ALPHA} |",
        f"| target modules | {', '.join(modules)} |",
        f"| training run | `{about.training_run}` |",
        f"| optimizer steps | {step} |",
        "",
        "```python",
        "from peft import PeftModel",
        f"from transformers import {loader}",
        "",
        f"base = {loader}.from_pretrained({base})",
        'model = PeftModel.from_pretrained(base, ".")',
        "```",
    ]
    return "\n".join(lines).encode() + b"\n"


def read_header(path: Path) -> tuple[dict[str, Any], int] | None:
    """The header of a safetensors file, and where its data begins; None if it is none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            return None
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return None
    return (header, 8 + length) if isinstance(header, dict) else None


def _seal(source: Path, target: Path, recipients: Sequence[str]) -> tuple[str, int]:
    temporary = target.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        sealed = sealing.seal(source, temporary, recipients)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return sealed


def _place(path: Path, content: bytes) -> None:
    """A file as a whole, under its name at once."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    write_file(temporary, [content], FILE_MODE)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    temporary = target.with_name(f".tmp-{secrets.token_hex(8)}")
    os.link(source, temporary)
    try:
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # rename(2) leaves both names where they are of one file already
