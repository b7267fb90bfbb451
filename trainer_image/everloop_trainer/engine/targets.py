"""Tokens that a client names at positions of its prompt, to be told their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.tensors import MAX_TARGETS, csr_rows
from everloop_trainer.tinker_proto import tinker_public

NOTHING = -1
"""In the place of a token: nothing is asked for here."""
_FIELD = "target_prompt_logprobs"


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """A matrix of token ids (rows, width), whose row i is about the prompt's token i + 1; the first follows nothing.

    `ids` are its cells row by row, all of them or, with `crow` and `columns`, those of compressed sparse rows.
    """

    rows: int
    width: int
    ids: NDArray[np.int64]
    crow: NDArray[np.int64] | None = None
    columns: NDArray[np.int64] | None = None

    @classmethod
    def from_header(cls, values: Mapping[str, Any] | None) -> Self | None:
        """As a message to the engine has them; None if none are asked for."""
        if values is None:
            return None
        ids, crow, columns = (
            None if values[name] is None else np.array(values[name], np.int64) for name in ("ids", "crow", "columns")
        )
        assert ids is not None, "a message has them"
        return cls(values["rows"], values["width"], ids, crow, columns)

    def check(self, length: int, vocab_size: int) -> None:
        """Raise ContentError, naming the field, if these are none for a prompt of that many tokens."""
        if self.rows != length - 1 or not 1 <= self.width <= MAX_TARGETS:
            raise ContentError(
                f"{_FIELD}.shape: must be [{length - 1}, K], a row for each prompt token but the first, with K from 1"
                f" to {MAX_TARGETS}, got [{self.rows}, {self.width}]"
            )
        if self.crow is None and self.ids.size != self.rows * self.width:
            raise ContentError(f"{_FIELD}.data: {self.ids.size} values for shape [{self.rows}, {self.width}]")
        self._row_of_each()
        for (index,) in np.argwhere((self.ids < NOTHING) | (self.ids >= vocab_size))[:1]:
            raise ContentError(
                f"{_FIELD}.data[{index}]: must be a token id (0 to {vocab_size - 1}) or {NOTHING},"
                f" got {self.ids[index]}"
            )
        if not (self.ids != NOTHING).any():
            raise ContentError(f"{_FIELD}.data: names no token")

    def cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where in `ids` a token is named, and the row of each of these; both ascend."""
        (named,) = np.nonzero(self.ids != NOTHING)
        return named, self._row_of_each()[named]

    def to_proto(self, values: NDArray[np.float32]) -> Any:
        """A value for each of `ids`, as a Tensor of this shape and layout."""
        tensor = tinker_public.Tensor(dtype=tinker_public.DTYPE_FLOAT32, shape=(self.rows, self.width))
        if self.crow is None or self.columns is None:
            tensor.dense = values.tobytes()
        else:
            tensor.sparse_csr.values = values.tobytes()
            tensor.sparse_csr.crow_indices = self.crow.tobytes()
            tensor.sparse_csr.col_indices = self.columns.tobytes()
        return tensor

    def _row_of_each(self) -> NDArray[np.int64]:
        if self.crow is None or self.columns is None:
            return np.repeat(np.arange(self.rows), self.width)
        return csr_rows(f"{_FIELD}.sparse_", self.crow, self.columns, self.ids.size, (self.rows, self.width))
