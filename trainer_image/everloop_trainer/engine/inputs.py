"""From the chunks that a client sends to the tokens of one sequence. Refusals name the field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.images import Image, ImageReader


@dataclass(frozen=True, slots=True)
class Limits:
    """What the base model can take.

    Attributes:
        vocab_size: token ids are below it.
        max_sequence_length: tokens.
        base_model: its name, for messages.
        images: what reads images; None if it takes none.
    """

    vocab_size: int
    max_sequence_length: int
    base_model: str = ""
    images: ImageReader | None = None


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One sequence: tokens int64 (n,), and its images in their order, with placeholders where they stand."""

    tokens: NDArray[np.int64]
    images: tuple[Image, ...] = ()


def read_chunks(field: str, chunks: Iterable[Any], limits: Limits) -> ModelInput:
    """Put the chunks of a `tinker_public.Datum` in a row.

    An image is as many tokens as the model makes of it, or the whole sequence is refused: none is cut.

    Raises ContentError.
    """
    parts: list[NDArray[np.int64]] = []
    images: list[Image] = []
    length = 0
    for index, chunk in enumerate(chunks):
        where = f"{field}.chunks[{index}]"
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            part = _text(where, chunk.encoded_text.tokens)
            _check_text(field, length, part, limits)
        elif kind == "image":
            if images and images[-1].start + images[-1].tokens == length:
                raise ContentError(f"{where}: an image right behind another one: give text between them")
            image = _image(where, chunk.image, length, limits)
            images.append(image)
            part = np.full(image.tokens, _reader(where, limits).placeholder)
        else:
            raise ContentError(f"{where}: {kind} chunks are not supported, only encoded_text and image")
        length += part.size
        parts.append(part)
    if not length:
        raise ContentError(f"{field}: must hold at least one token")
    if length > limits.max_sequence_length:
        raise ContentError(f"{field}: {length} tokens exceed the maximum of {limits.max_sequence_length}")
    return ModelInput(np.concatenate(parts), tuple(images))


def check_tokens(field: str, tokens: NDArray[Any], limits: Limits, *, first: int = 0) -> None:
    """Raise ContentError if one of these is no token id; `first` is the index of the first one in `field`."""
    for position in np.argwhere((tokens < 0) | (tokens >= limits.vocab_size))[:1]:
        token = tokens[tuple(position)]
        position[0] += first
        raise ContentError(
            f"{field}{at(position)}: token id {token} is outside the vocabulary (0 to {limits.vocab_size - 1})"
        )


def at(position: NDArray[Any]) -> str:
    """A place in an array as it stands behind a field's name."""
    return "".join(f"[{index}]" for index in position)


def not_text(token: int) -> str:
    """What is said of a token that stands for something else."""
    return f"token id {token} stands for a part of an image or video: send images as chunks"


def _text(where: str, data: bytes) -> NDArray[np.int64]:
    if len(data) % 4:
        raise ContentError(f"{where}.tokens: {len(data)} bytes are no int32 array")
    return np.frombuffer(data, "<i4").astype(np.int64)


def _check_text(field: str, first: int, tokens: NDArray[np.int64], limits: Limits) -> None:
    check_tokens(field, tokens, limits, first=first)
    if limits.images is not None:
        for (index,) in np.argwhere(np.isin(tokens, list(limits.images.reserved)))[:1]:
            raise ContentError(f"{field}[{first + index}]: {not_text(tokens[index])}")


def _image(where: str, chunk: Any, start: int, limits: Limits) -> Image:
    reader = _reader(where, limits)
    if chunk.HasField("override_dimensions"):
        raise ContentError(f"{where}.override_dimensions: not served: an image is taken as it is")
    expected = chunk.expected_tokens if chunk.HasField("expected_tokens") else None
    tokens = reader.measure(where, chunk.data, chunk.format, expected)
    return Image(where, start, tokens, chunk.format, chunk.data)


def _reader(where: str, limits: Limits) -> ImageReader:
    if limits.images is None:
        raise ContentError(f"{where}: base model {limits.base_model!r} takes no images, only text")
    return limits.images
