"""Attention over sequences of different lengths, one new token each; everything else is transformers' own.

Linear layers see all rows of a step at once. Attention sees each row with its own keys and values alone, so that no row
is padded to another's length: what a row attends to, and in which order it is summed, depends on that row only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "everloop"
"""transformers makes no mask for an implementation that is not its own; torch's causal flag stands in."""
BLOCK_TOKENS = 256
"""By so much the memory of a row grows."""


class Row:
    """Keys and values of one sequence: per layer float (key-value heads, capacity, head size).

    Attributes:
        length: tokens whose keys and values are there.
        last: the token that comes next, not in it yet.
        offset: the position of that token less `length`: an image takes up fewer positions than tokens.
    """

    def __init__(self, cache: DynamicCache, last: int, offset: int = 0) -> None:
        """Copy what a prefill of one sequence has cached."""
        self._keys = [_with_room(layer.keys[0]) for layer in cache.layers]
        self._values = [_with_room(layer.values[0]) for layer in cache.layers]
        self.length = int(cache.get_seq_length())
        self.last = last
        self.offset = offset

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one token's key and value (heads, 1, head size) and return all (heads, length + 1, head size).

        `length` stays: the other layers are still to come.
        """
        end = self.length + 1
        for store, new in ((self._keys, key), (self._values, value)):
            if store[layer].shape[1] < end:
                store[layer] = _with_room(store[layer])
            store[layer][:, self.length : end] = new
        return self._keys[layer][:, :end], self._values[layer][:, :end]


def _with_room(tensor: torch.Tensor) -> torch.Tensor:
    heads, length, size = tensor.shape
    larger = tensor.new_empty(heads, length + BLOCK_TOKENS - length % BLOCK_TOKENS, size)
    larger[:, :length] = tensor
    return larger


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: Sequence[Row] | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query (batch, heads, length, size); returns (batch, length, heads, size).

    With `rows` each batch entry is one new token of its row; entries beyond the rows are padding.
    """
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    batch, heads, _, size = query.shape
    output = query.new_zeros(batch, heads, size)
    for index, row in enumerate(rows):
        keys, values = row.append(module.layer_idx, key[index], value[index])
        # The heads that share keys and values are the queries of one call.
        shared = query[index].view(1, keys.shape[0], -1, size)
        attended = functional.scaled_dot_product_attention(shared, keys[None], values[None], scale=scaling)
        output[index] = attended.reshape(heads, size)
    return output[:, None], None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
