"""A tensor of the wire as an array; refusals name the field."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from everloop_trainer.engine.errors import ContentError
from everloop_trainer.tinker_proto import tinker_public

MAX_TARGETS = 1024
"""Targets of one position: a sparse tensor must not claim more memory than its bytes are worth."""
_NUMPY_TYPES: dict[int, np.dtype[Any]] = {
    tinker_public.DTYPE_FLOAT32: np.dtype("<f4"),
    tinker_public.DTYPE_INT64: np.dtype("<i8"),
    tinker_public.DTYPE_INT32: np.dtype("<i4"),
}


def decode(field: str, tensor: Any, length: int) -> NDArray[Any]:
    """Return a Tensor as (length,) or (length, K), one row for each input token; cells that are not listed are 0.

    Raises ContentError.
    """
    sparse, values = _stored(field, tensor)
    shape = tuple(tensor.shape) or (values.size,)
    if len(shape) > 2 or (len(shape) == 2 and not 1 <= shape[1] <= MAX_TARGETS) or (sparse and len(shape) != 2):
        raise ContentError(
            f"{field}: shape {shape} is not supported; give ({length},), or ({length}, K) with K up to {MAX_TARGETS}"
        )
    if not sparse and int(np.prod(shape)) != values.size:
        raise ContentError(f"{field}: shape {shape} does not match its {values.size} values")
    if shape[0] != length:
        raise ContentError(f"{field}: {shape[0]} {'values' if len(shape) == 1 else 'rows'} for {length} input tokens")
    return _scattered(field, tensor.sparse_csr, values, shape) if sparse else values.reshape(shape)


def decode_ranked(field: str, tensor: Any, rank: int) -> NDArray[Any]:
    """Return a Tensor of that rank, 0, 1 or 2, of any length; cells that are not listed are 0. Raises ContentError."""
    sparse, values = _stored(field, tensor)
    shape = tuple(tensor.shape) or ((values.size,) if rank else ())
    if len(shape) != rank:
        raise ContentError(f"{field}: shape {shape} has rank {len(shape)}, the loss takes rank {rank}")
    if min(shape, default=0) < 0 or (rank == 2 and shape[1] > MAX_TARGETS) or (sparse and rank != 2):
        raise ContentError(f"{field}: shape {shape} is not supported; the second dimension is at most {MAX_TARGETS}")
    if not sparse and int(np.prod(shape)) != values.size:
        raise ContentError(f"{field}: shape {shape} does not match its {values.size} values")
    return _scattered(field, tensor.sparse_csr, values, shape) if sparse else values.reshape(shape)


def _stored(field: str, tensor: Any) -> tuple[bool, NDArray[Any]]:
    """Whether a Tensor is sparse, and the values that it lists."""
    dtype = _NUMPY_TYPES.get(tensor.dtype)
    if dtype is None:
        raise ContentError(f"{field}: dtype {tensor.dtype} is not supported; use float32 or int64")
    sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    return sparse, _array(field, tensor.sparse_csr.values if sparse else tensor.dense, dtype)


def _array(field: str, data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise ContentError(f"{field}: {len(data)} bytes are no {dtype} array")
    return np.frombuffer(data, dtype)


def _scattered(field: str, csr: Any, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """From compressed sparse rows: row i holds values[crow[i]:crow[i + 1]] in these columns."""
    crow = _array(f"{field}.crow_indices", csr.crow_indices, np.dtype("<i8"))
    columns = _array(f"{field}.col_indices", csr.col_indices, np.dtype("<i8"))
    dense = np.zeros(shape, values.dtype)
    dense[csr_rows(f"{field}.", crow, columns, values.size, shape), columns] = values
    return dense


def csr_rows(
    prefix: str, crow: NDArray[np.int64], columns: NDArray[np.int64], count: int, shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """Return the row of each of `count` values in compressed sparse rows.

    Raises ContentError if the indices are not those of so many cells of this shape; `prefix` begins their names.
    """
    counts = np.diff(crow)
    if crow.size != shape[0] + 1 or crow[0] != 0 or crow[-1] != count or (counts < 0).any():
        raise ContentError(f"{prefix}crow_indices: don't divide {count} values among {shape[0]} rows")
    if columns.size != count:
        raise ContentError(f"{prefix}col_indices: {columns.size} indices for {count} values")
    if columns.size and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise ContentError(f"{prefix}col_indices: must be 0 to {shape[1] - 1}")
    rows = np.repeat(np.arange(shape[0]), counts)
    if np.unique(rows * shape[1] + columns).size != count:
        raise ContentError(f"{prefix}col_indices: a row names a column twice")
    return rows
