"""Whether a message is worth decoding, told from its bytes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop_trainer.server import fragments
from everloop_trainer.tinker_proto import tinker_public
from tests.server.wire import forward_backward_body, texts

LAYOUT = fragments.layout(tinker_public.ForwardBackwardRequest.DESCRIPTOR)
MODEL = b"\x0a\x01a"
ENOUGH = fragments.UNSCANNED_BYTES


def within(tags: bytes, content: bytes) -> bytes:
    """Content in a field in a field: the tags from the outermost to the innermost."""
    for tag in reversed(tags):
        content = bytes([tag]) + _varint(len(content)) + content
    return content


def _varint(number: int) -> bytes:
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * (ENOUGH // 2 + 1),
        b"\x9a\x80\x00\x00" * ENOUGH,
        within(b"\x1a", b"\x0a\x00" * ENOUGH),
        within(b"\x1a", b"\x1a\x00" * ENOUGH),
        within(b"\x1a\x12\x12", b"\x12\x00\x0a\x00" * ENOUGH),
        within(b"\x1a\x0a", b"\x0a\x00\x12\x00" * ENOUGH),
        within(b"\x1a\x12\x12\x22", bytes(ENOUGH)),
        MODEL + b"\x1a\x00" * ENOUGH + b"\xff",
    ],
    ids=["datums", "long tags", "chunks", "spans", "tensors in turn", "kinds of chunks in turn", "packed", "no end"],
)
def test_a_body_of_fragments_is_known_before_it_is_decoded(body: bytes) -> None:
    """In every message that may repeat, in any of its spellings."""
    begun = time.process_time()
    assert fragments.is_fragmented(body, LAYOUT)
    assert time.process_time() - begun < 5


def test_a_large_request_of_the_sdk_is_none() -> None:
    """Its bytes are those of tokens and tensors."""
    body = forward_backward_body("s-1:train:0", 1, texts(1, 128, 2000))
    assert len(body) > 2 * ENOUGH
    assert not fragments.is_fragmented(body, LAYOUT)


@pytest.mark.parametrize("body", [b"\x80" * (8 * ENOUGH), b"\x0a" + b"\xff" * (8 * ENOUGH), b"\x0f" * (2 * ENOUGH)])
def test_what_is_no_message_takes_no_time(body: bytes) -> None:
    """A number without end is none."""
    begun = time.process_time()
    assert not fragments.is_fragmented(body, LAYOUT)
    assert time.process_time() - begun < 1


@given(st.binary(max_size=200))
def test_any_bytes_are_counted(end: bytes) -> None:
    """Never an error: whether it is a message is the decoder's to say."""
    assert not fragments.is_fragmented(MODEL[:1] + _varint(ENOUGH) + bytes(ENOUGH) + end, LAYOUT)
