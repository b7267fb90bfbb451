"""Merge a PEFT adapter into its base model: a transformers directory that needs neither PEFT nor Everloop.

`python -m everloop_trainer merge --adapter DIR --base-model DIR --out DIR` works offline and tensor by tensor: memory
holds the adapter, and what it takes to change one weight. W + (alpha / rank) B A is computed in float32 and rounded to
W's own dtype once; for a base model in float32 the result has the bits of PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from everloop_trainer.durable import sync_directory
from everloop_trainer.peftfiles import CARD, CONFIG, LOADER, SEEING_LOADER, WEIGHTS

PREFIX = "base_model.model."
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
INDEX = "model.safetensors.index.json"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


class MergeError(Exception):
    """The two cannot be merged; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: by weight of the base model its factors A (rank, in_features) and B (out_features, rank)."""

    scale: float
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight with its term added, in its own dtype; itself if it has none. Raises MergeError."""
        if name not in self.factors:
            return weight
        a, b = self.factors[name]
        if weight.shape != (b.shape[0], a.shape[1]) or weight.dtype not in _DTYPES:
            raise MergeError(
                f"{name}: the adapter is for shape {[b.shape[0], a.shape[1]]}, and the base model's weight is "
                f"{weight.dtype} of shape {list(weight.shape)}"
            )
        return (weight.float() + (b @ a) * self.scale).to(weight.dtype)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the result: where it comes from, and its name there and here."""

    source: Path
    stored: str
    name: str


def read_adapter(directory: Path) -> Adapter:
    """Read the adapter in a PEFT directory. Raises MergeError, OSError."""
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text())
        if config["peft_type"] != "LORA" or config.get("use_dora") or config.get("use_rslora"):
            raise MergeError(f"{path}: only plain LoRA can be merged")
        scale = float(config["lora_alpha"]) / int(config["r"])
    except (ValueError, KeyError, TypeError) as error:
        raise MergeError(f"{path}: not the configuration of an adapter: {error!r}") from error
    found: dict[str, dict[str, torch.Tensor]] = {}
    path = directory / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                module, _, factor = key.removeprefix(PREFIX).rpartition(".lora_")
                if not key.startswith(PREFIX) or factor not in ("A.weight", "B.weight"):
                    raise MergeError(f"{path}: {key} is no factor of a LoRA adapter")
                found.setdefault(f"{module}.weight", {})[factor[0]] = file.get_tensor(key).float()
    except SafetensorError as error:
        raise MergeError(f"{path}: not a safetensors file: {error}") from error
    incomplete = sorted(name for name, factors in found.items() if len(factors) != 2)
    if incomplete:
        raise MergeError(f"{path}: {incomplete[0]} has one factor of two")
    return Adapter(scale, {name: (factors["A"], factors["B"]) for name, factors in found.items()})


def plan(stored: Mapping[str, Path], trained: Sequence[str], *, untied: bool) -> dict[str, list[Place]]:
    """Which file of the result holds what: that of the base model, but for a new head. Pure.

    Args:
        stored: by name: the file of the base model that holds a tensor.
        trained: names of the weights that the adapter changes.
        untied: whether the head, which was the embedding, becomes a tensor of its own.

    Raises:
        MergeError: the base model lacks a weight that the adapter changes.
    """
    files: dict[str, list[Place]] = {}
    for name, path in sorted(stored.items()):
        if not (untied and name == HEAD):
            files.setdefault(path.name, []).append(Place(path, name, name))
    if untied:
        embedding = next((name for name in stored if name.endswith(EMBEDDING)), None)
        if embedding is None:
            raise MergeError(f"{HEAD}: the base model has no embedding that it could be a copy of")
        files["head"] = [Place(stored[embedding], embedding, HEAD)]
    held = {place.name for places in files.values() for place in places}
    missing = [name for name in trained if name not in held]
    if missing:
        raise MergeError(f"{missing[0]}: the adapter changes it, and the base model has no such weight")
    # Named by their number, as transformers does: it takes a file named "model" for all there is.
    return {_file_name(index, len(files)): places for index, places in enumerate(files.values(), 1)}


def merge(adapter_directory: Path, base: Path, out: Path) -> None:
    """Write the merged model to the new directory `out`, which appears complete or not at all.

    Raises MergeError, and OSError if storage fails.
    """
    if out.exists():
        raise MergeError(f"{out}: exists already")
    adapter = read_adapter(adapter_directory)
    config = _json(base / "config.json")
    # A tied head that was trained is one no more: the embedding stays as it was. Models that do not say are not tied.
    untied = HEAD in adapter.factors and bool(config.get("tie_word_embeddings", False))
    files = plan(_stored(base), sorted(adapter.factors), untied=untied)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        target = Path(scratch) / "model"
        target.mkdir()
        sizes = {name: _write_file(target / name, places, adapter) for name, places in files.items()}
        for path in base.iterdir():
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, target / path.name)
        if untied:
            (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2) + "\n")
        if len(files) > 1:
            places = {place.name: name for name, held in files.items() for place in held}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
            (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        _write_card(adapter_directory / CARD, target / CARD)
        target.rename(out)
        sync_directory(out.parent)


def _stored(base: Path) -> dict[str, Path]:
    """The tensors of a transformers directory by name, with their files."""
    index = base / INDEX
    if index.exists():
        return {name: base / file for name, file in _json(index)["weight_map"].items()}
    path = base / "model.safetensors"
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index:05}-of-{count:05}.safetensors"


def _write_file(path: Path, places: Sequence[Place], adapter: Adapter) -> int:
    """Write one safetensors file, tensor by tensor; returns the bytes of its tensors."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for place, shape, dtype, size in _described(places):
        table[place.name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for place in places:
            with _opened(place.source) as source:
                _write_tensor(file, adapter.merged(place.name, source.get_tensor(place.stored)))
    return end


def _described(places: Sequence[Place]) -> Iterator[tuple[Place, list[int], str, int]]:
    """Each tensor with its shape, dtype as safetensors names it, and size in bytes, from the files' own headers."""
    headers: dict[Path, dict[str, Any]] = {}
    for place in places:
        if place.source not in headers:
            with place.source.open("rb") as file:
                headers[place.source] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found = headers[place.source][place.stored]
        start, stop = found["data_offsets"]
        yield place, found["shape"], found["dtype"], stop - start


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_card(source: Path, target: Path) -> None:
    """The adapter's card, if it has one, said of a model that needs no PEFT."""
    if not source.exists():
        return
    text, found, _ = source.read_text().partition("```python\n")
    card = text.replace("library_name: peft\n", "library_name: transformers\n")
    if found:
        loader = SEEING_LOADER if SEEING_LOADER in source.read_text() else LOADER
        card += f"Merged into the base model: `{loader}.from_pretrained` loads this directory as it is.\n"
    target.write_text(card)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise MergeError(f"{path}: not a safetensors file: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise MergeError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise MergeError(f"{path}: not a JSON object")
    return content


def main(arguments: Sequence[str]) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m everloop_trainer merge", description=__doc__)
    parser.add_argument("--adapter", type=Path, required=True, help="directory of a named sampler checkpoint")
    parser.add_argument("--base-model", type=Path, required=True, help="transformers directory with safetensors files")
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    options = parser.parse_args(arguments)
    try:
        merge(options.adapter, options.base_model, options.out)
    except (MergeError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0
