"""Pictures for a small Qwen3-VL, and what transformers makes of them by itself."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from everloop_trainer.tinker_proto import tinker_public
from tests.server.tinyvision import IMAGE

Part = Sequence[int] | bytes
"""Tokens, or the file of an image."""


def picture(width: int, height: int, seed: int = 0, format: str = "png", mode: str = "RGB") -> bytes:
    """The file of a picture of random blocks."""
    colours = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    image = PIL.Image.fromarray(colours).resize((width, height), PIL.Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.convert("L").convert(mode).save(file, format) if mode == "I;16" else image.convert(mode).save(file, format)
    return file.getvalue()


def chunks(*parts: Part) -> Any:
    """The parts as a Datum's model_input; its message."""
    datum = tinker_public.Datum()
    for part in parts:
        if isinstance(part, bytes):
            datum.model_input.add().image.data = part
            datum.model_input[-1].image.format = "png" if part.startswith(b"\x89PNG") else "jpeg"
        else:
            datum.model_input.add().encoded_text.tokens = np.asarray(part, np.int32).tobytes()
    return datum


def plain_seeing_model(path: Path) -> Any:
    """The model as transformers loads it, in evaluation mode."""
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def plain_inputs(path: Path, *parts: Part) -> dict[str, torch.Tensor]:
    """What its own processor makes of the parts, as the model takes it."""
    processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    tokens: list[int] = []
    pixels, grids = [], []
    for part in parts:
        if isinstance(part, bytes):
            found = processor(images=[PIL.Image.open(io.BytesIO(part))], return_tensors="pt")
            pixels.append(found["pixel_values"])
            grids.append(found["image_grid_thw"])
            tokens += [IMAGE] * (int(grids[-1].prod()) // 4)
        else:
            tokens += part
    ids = torch.tensor([tokens])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pixels:
        inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs
