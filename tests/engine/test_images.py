"""Images of clients: measured as the model's own processor does, and refused by name where they can't be taken."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageFile
import pytest
import torch

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.datums import parse_request
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.images import Image, ImageReader
from everloop_trainer.engine.inputs import read_chunks
from tests.engine.client import datum, request
from tests.engine.seeing import chunks, picture, plain_inputs
from tests.server.tinyvision import IMAGE, VIDEO

TEXT = [10, 20, 30]
SIZES = [(1, 1), (16, 16), (17, 31), (64, 64), (3, 200), (200, 3), (1, 33), (640, 480), (99, 100)]


@pytest.fixture
def reader(seeing_base: BaseModel) -> ImageReader:
    """That of the small model."""
    assert seeing_base.limits.images is not None
    return seeing_base.limits.images


def _image(data: bytes, format: str = "png") -> Image:
    return Image("here", 0, 0, format, data)


def _read(reader: ImageReader, data: bytes, format: str) -> None:
    reader.measure("here", data, format, None)
    reader.prepare(_image(data, format))


@pytest.mark.parametrize(
    ("format", "mode"),
    [("png", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")]
    + [("jpeg", mode) for mode in ("RGB", "L", "CMYK")],
)
def test_images_are_measured_and_prepared_as_the_models_processor_does(
    reader: ImageReader, seeing_model: Path, format: str, mode: str
) -> None:
    """Of every size and kind: as many tokens by the header as there are when it is decoded, and the same patches."""
    for width, height in SIZES:
        data = picture(width, height, width, format, mode)
        expected = plain_inputs(seeing_model, data)
        assert reader.measure("here", data, format, None) == expected["input_ids"].shape[1]
        pixels, grid = reader.prepare(_image(data, format))
        assert torch.equal(grid, expected["image_grid_thw"])
        assert torch.equal(pixels, expected["pixel_values"])


def _png(width: int, height: int) -> bytes:
    """A file whose header claims this size, with next to no data."""

    def block(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [block(b"IHDR", header), block(b"IDAT", zlib.compress(bytes(100))), block(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


GOOD = picture(40, 40)
REFUSALS: dict[str, tuple[bytes, str, int | None, str]] = {
    "format": (GOOD, "webp", None, "here.format: must be png or jpeg, got 'webp'"),
    "empty": (b"", "png", None, "here.data: is empty"),
    "bytes": (GOOD + bytes(8 << 20), "png", None, f"here.data: {len(GOOD) + (8 << 20)} bytes exceed the maximum of"),
    "no image": (b"GIF89a is another format", "png", None, "here.data: not a png image"),
    "other format": (picture(40, 40, format="jpeg"), "png", None, "here.data: not a png image"),
    "half a header": (GOOD[:20], "png", None, "here.data: not a png image: "),
    "pixels": (_png(4097, 4096), "png", None, "here.data: 4097 x 4096 pixels exceed the maximum of 16777216"),
    "a bomb": (_png(12_000, 12_000), "png", None, "here.data: 12000 x 12000 pixels exceed the maximum of"),
    "a larger bomb": (_png(60_000, 60_000), "png", None, "here.data: more than 16777216 pixels"),
    "no pixels": (_png(0, 9), "png", None, "here.data: not a png image"),
    "long": (picture(402, 2), "png", None, "here.data: 402 x 2 pixels: absolute aspect ratio must be smaller than 200"),
    "tokens": (
        GOOD,
        "png",
        5,
        "here.expected_tokens: must be 4 for an image of 40 x 40 pixels with base model 'test/seeing', got 5",
    ),
    "scans": (
        picture(40, 40, format="jpeg") + b"\xff\xda" * 101,
        "jpeg",
        None,
        "here.data: has more than 100 scans",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_taken_is_refused_before_it_is_decoded(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """By its header alone, and the message names the field, the value and what is allowed."""

    def decode(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", decode)
    data, named, expected, message = REFUSALS[case]
    with pytest.raises(ContentError) as refusal:
        reader.measure("here", data, named, expected)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_a_file_that_ends_early_is_refused(reader: ImageReader, format: str) -> None:
    """Wherever it ends: nothing is filled up, and no image is taken for whole."""
    data = picture(80, 60, 3, format)
    for length in range(1, len(data) - 40, max(1, len(data) // 40)):
        with pytest.raises(ContentError, match=r"^here\.data: not a "):
            _read(reader, data[:length], format)


@pytest.mark.filterwarnings("ignore")  # of Pillow, on what else is wrong with a file
@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_a_damaged_file_is_refused_or_decoded(reader: ImageReader, format: str) -> None:
    """Whatever its bytes are, nothing else is raised than a refusal."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    original = picture(37, 53, 3, format, "RGB" if format == "jpeg" else "P")
    refused = 0
    for _ in range(200):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            _read(reader, bytes(data), format)
        except ContentError:
            refused += 1
    assert refused > 0


def _spoilt(change: Callable[[Any], object], *parts: Any) -> Any:
    message = chunks(*parts)
    change(message)
    return message


def _audio(message: Any) -> None:
    message.model_input[1].dmel.dmel = b"12"


def _dimensions(message: Any) -> None:
    message.model_input[1].image.override_dimensions.width = 5


def _expected(message: Any) -> None:
    message.model_input[1].image.expected_tokens = 9


SEQUENCES: dict[str, tuple[Any, str]] = {
    "audio": (_spoilt(_audio, TEXT, GOOD), "prompt.chunks[1]: dmel chunks are not supported"),
    "dimensions": (_spoilt(_dimensions, TEXT, GOOD), "prompt.chunks[1].override_dimensions: not served"),
    "expected": (_spoilt(_expected, TEXT, GOOD), "prompt.chunks[1].expected_tokens: must be 4"),
    "neighbours": (chunks(TEXT, GOOD, GOOD), "prompt.chunks[2]: an image right behind another one"),
    "placeholder": (chunks(TEXT, GOOD, [5, IMAGE]), f"prompt[8]: token id {IMAGE} stands for a part of an image"),
    "video": (chunks([VIDEO], GOOD), f"prompt[0]: token id {VIDEO} stands for a part of an image"),
    "vocabulary": (chunks(TEXT, GOOD, [320]), "prompt[7]: token id 320 is outside the vocabulary (0 to 319)"),
    "length": (chunks([1] * 125, GOOD), "prompt: 129 tokens exceed the maximum of 128"),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences_with_images_are_refused_by_the_chunk_or_the_token(seeing_base: BaseModel, case: str) -> None:
    """An image counts with all its tokens, and is never cut to fit."""
    message, problem = SEQUENCES[case]
    with pytest.raises(ContentError) as refusal:
        read_chunks("prompt", message.model_input, seeing_base.limits)
    assert str(refusal.value).startswith(problem)


def test_the_longest_sequence_may_end_with_an_image(seeing_base: BaseModel) -> None:
    """Its last token is the image's last one."""
    found = read_chunks("prompt", chunks([1] * 124, GOOD).model_input, seeing_base.limits)
    assert found.tokens.tolist() == [1] * 124 + [IMAGE] * 4
    ((image),) = found.images
    assert (image.start, image.tokens) == (124, 4)


def test_models_of_text_refuse_images_by_their_name(tiny_base: BaseModel) -> None:
    """In training and in prompts."""
    message = datum(TEXT)
    message.model_input.add().image.data = GOOD
    with pytest.raises(ContentError) as refusal:
        parse_request(request(datum(TEXT), message), tiny_base.limits)
    assert str(refusal.value) == "data[1].model_input.chunks[1]: base model 'test' takes no images, only text"


def test_limits_are_those_of_the_configuration(seeing_base: BaseModel) -> None:
    """A platform may set them lower."""
    reader = seeing_base.limits.images
    assert reader is not None
    small = ImageReader(reader._processor, replace(reader._limits, max_bytes=100), "m", IMAGE, frozenset())
    with pytest.raises(ContentError, match="exceed the maximum of 100"):
        small.measure("here", GOOD, "png", None)
    file = io.BytesIO()
    PIL.Image.new("RGB", (40, 40)).save(file, "png")
    few = ImageReader(reader._processor, replace(reader._limits, max_pixels=1599), "m", IMAGE, frozenset())
    with pytest.raises(ContentError, match="40 x 40 pixels exceed the maximum of 1599"):
        few.measure("here", file.getvalue(), "png", None)
