"""Images of clients: measured by their headers, decoded late, and prepared by the base model's own processor.

Pillow reads a header to tell format and size, so what is too large is refused before it is decoded. What a decoder
finds wrong later is a refusal like any other.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import Any

import PIL.Image
import torch

from everloop_trainer.engine.errors import ContentError

MOST_SCANS = 100
"""Passes over a JPEG. Encoders make about ten; a small file may ask for many thousands, each over all pixels."""
_FORMATS = {"png": "PNG", "jpeg": "JPEG"}
_SCAN = b"\xff\xda"
_UNREADABLE = (OSError, SyntaxError, ValueError, IndexError, TypeError, OverflowError, struct.error, zlib.error)
"""What Pillow's readers of these two formats raise for files that are none, or are damaged."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What an image may have: bytes as it is sent, and pixels once it is decoded."""

    max_bytes: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a sequence, as it was sent.

    Attributes:
        field: where the client put it.
        start: index of its first token in the sequence.
        tokens: how many it has, placeholders all of them.
        format: `png` or `jpeg`.
        data: the file.
    """

    field: str
    start: int
    tokens: int
    format: str
    data: bytes


class ImageReader:
    """Measures and prepares images as one base model wants them.

    Args:
        processor: transformers' image processor of that model.
        limits: for each image.
        base_model: its name, for messages.
        placeholder: the token id that stands for a part of an image.
        reserved: this and all other ids that stand for something that is no text.
    """

    def __init__(
        self, processor: Any, limits: ImageLimits, base_model: str, placeholder: int, reserved: frozenset[int]
    ) -> None:
        self._processor = processor
        self._limits = limits
        self._base_model = base_model
        self.placeholder = placeholder
        self.reserved = reserved

    def measure(self, field: str, data: bytes, format: str, expected: int | None) -> int:
        """How many tokens an image has, by its header; `expected` is what the client takes it for.

        Raises ContentError naming what of `field` is wrong.
        """
        if format not in _FORMATS:
            raise ContentError(f"{field}.format: must be {' or '.join(_FORMATS)}, got {format!r}")
        if not data:
            raise ContentError(f"{field}.data: is empty")
        if len(data) > self._limits.max_bytes:
            raise ContentError(f"{field}.data: {len(data)} bytes exceed the maximum of {self._limits.max_bytes}")
        if format == "jpeg" and data.count(_SCAN) > MOST_SCANS:
            raise ContentError(f"{field}.data: has more than {MOST_SCANS} scans")
        width, height = self._size(field, data, format)
        try:
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise ContentError(f"{field}.data: {width} x {height} pixels: {error}") from error
        tokens = int(patches // self._processor.merge_size**2)
        if expected is not None and expected != tokens:
            raise ContentError(
                f"{field}.expected_tokens: must be {tokens} for an image of {width} x {height} pixels with base model"
                f" {self._base_model!r}, got {expected}"
            )
        return tokens

    def prepare(self, image: Image) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode an image: patches float32 (patches, values of one), and their grid int64 (1, 3): time, rows, columns.

        Raises ContentError.
        """
        try:
            with PIL.Image.open(io.BytesIO(image.data), formats=[_FORMATS[image.format]]) as opened:
                opened.load()
                found = self._processor(images=[opened], return_tensors="pt")
        except _UNREADABLE as error:
            raise ContentError(f"{image.field}.data: not a whole {image.format} image: {error}") from error
        return found["pixel_values"], found["image_grid_thw"]

    def _size(self, field: str, data: bytes, format: str) -> tuple[int, int]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # our own limit comes below
                with PIL.Image.open(io.BytesIO(data), formats=[_FORMATS[format]]) as opened:
                    width, height = opened.size
        except PIL.Image.DecompressionBombError as error:
            raise ContentError(f"{field}.data: more than {self._limits.max_pixels} pixels") from error
        except PIL.UnidentifiedImageError as error:  # says no more than that
            raise ContentError(f"{field}.data: not a {format} image") from error
        except _UNREADABLE as error:
            raise ContentError(f"{field}.data: not a {format} image: {error}") from error
        if width * height > self._limits.max_pixels:
            raise ContentError(
                f"{field}.data: {width} x {height} pixels exceed the maximum of {self._limits.max_pixels}"
            )
        return width, height
