"""Serialised protobuf messages with something wrong in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

HUGE = b"\xff" * 9 + b"\x01"
"""2^64 - 1 as a number."""
PARTS = (
    b"\x10" + HUGE,
    b"\x10\x00",
    b"\x0a\x00",
    b"\x1a\x00",
    b"\x1a\x02\x0a\x00",
    b"\x1a\x06\x12\x04\x0a\x00\x12\x00",
    b"\x1a" + HUGE,
    b"\x22\x04what",
    b"\x22\x02\xff\xfe",
    b"\x30\x01",
    b"\x30" + HUGE,
    b"\x0b\x0c",
    b"\x1b" * 200,
    b"\x8a\x00\x01c",
    b"\xff" * 11,
    b"\x7a\x03\x00\x00\x00",
    b"\x2a\x0d\x0a\x02lr\x11" + b"\xff" * 8,
    b"\x1a\x08\x1a\x06" + b"\x0a\x04\x0a\x02zz",
)
"""Fields of a ForwardBackwardRequest, and what is none: empty, huge, in groups, of the wrong type, not UTF-8."""


@st.composite
def broken(draw: Callable[..., Any], valid: bytes) -> bytes:
    """A message with one to three things wrong, or merely odd, in it."""
    body = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, len(body)))
        match draw(st.sampled_from(("bit", "bit", "byte", "cut", "gone", "part", "part", "again"))):
            case "bit" if body:
                body[position % len(body)] ^= 1 << draw(st.integers(0, 7))
            case "byte" if body:
                body[position % len(body)] = draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)))
            case "cut":
                del body[position:]
            case "gone":
                del body[position : position + draw(st.integers(1, 40))]
            case "part":
                body += draw(st.sampled_from(PARTS))
            case "again":
                body += valid
    return bytes(body)


def numbered(body: bytes, number: int) -> bytes:
    """The message of an operation with this number: of a field that comes twice, the last counts."""
    parts = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*body, 0x10, *(part | 0x80 for part in parts[:-1]), parts[-1]])
