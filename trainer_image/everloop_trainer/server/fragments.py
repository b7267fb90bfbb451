"""How many fields a serialised protobuf message has, before anything is decoded.

A message of two bytes becomes an object of some sixty: what is decoded may take thirty times the memory of its body.
The encoding is that of https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from typing import Any

UNSCANNED_BYTES = 1 << 20
"""A body up to this size decodes into little, whatever is in it."""
MOST_FIELDS = 1 << 18
"""Fields of a larger one, of all its messages, and elements of packed arrays; tokens and tensors are one field each."""

_VARINT, _FIXED64, _LENGTH_DELIMITED, _GROUP, _GROUP_END, _FIXED32 = range(6)
_VARINT_BITS = 70
_PACKABLE = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 17, 18})
"""Types of FieldDescriptor whose repeated values may be packed."""

Layout = dict[int, "Layout | None"]
"""By tag, fields that hold more than themselves: messages with their own layout, and packed arrays (None)."""


def layout(descriptor: Any) -> Layout:
    """The layout of a message type, which must not contain itself."""
    found: Layout = {}
    for field in descriptor.fields:
        tag = field.number << 3 | _LENGTH_DELIMITED
        if field.message_type is not None:
            found[tag] = layout(field.message_type)
        elif field.is_repeated and field.type in _PACKABLE:
            found[tag] = None
    return found


def is_fragmented(body: bytes, outer: Layout) -> bool:
    """Whether a message has more than MOST_FIELDS fields, as far as it is one: the decoder says whether it is."""
    if len(body) <= UNSCANNED_BYTES:
        return False
    count, parts = 0, [(0, len(body), outer)]
    while parts:
        position, end, fields = parts.pop()
        while position < end:
            count += 1
            if count > MOST_FIELDS:
                return True
            tag, position = _varint(body, position, end)
            wire_type = tag & 7
            if wire_type == _LENGTH_DELIMITED:
                length, position = _varint(body, position, end)
                if tag in fields and position + length <= end:
                    inner = fields[tag]
                    if inner is None:
                        count += length
                    else:
                        parts.append((position, position + length, inner))
                position += length
            elif wire_type == _VARINT:
                _, position = _varint(body, position, end)
            elif wire_type in (_FIXED64, _FIXED32):
                position += 8 if wire_type == _FIXED64 else 4
            elif wire_type not in (_GROUP, _GROUP_END):
                break
    return count > MOST_FIELDS


def _varint(body: bytes, position: int, end: int) -> tuple[int, int]:
    """The number at `position` and where it ends; one that is none ends the message."""
    value = shift = 0
    while position < end and shift < _VARINT_BITS:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return value, end
