"""Choosing a token: a function of logits, request and one number, which depends on (seed, sample, position) alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1) that depends on its three arguments alone (Philox, Salmon et al., 2011)."""
    key = np.array([seed % 2**64, sample_index], np.uint64)
    counter = np.array([position, 0, 0, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def uniforms(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for draws at a position of a prompt; none is one that `uniform` gives."""
    key = np.array([seed % 2**64, position], np.uint64)
    counter = np.array([0, 1, 0, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)


def without(logits: NDArray[np.float64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return logits by which none of these tokens is ever picked."""
    if not ids.size:
        return logits
    left = logits.copy()
    left[ids] = -np.inf
    return left


def draw(logits: NDArray[np.float64], temperature: float, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Pick a token of the whole vocabulary for each of `numbers`, as `choose` does, with replacement."""
    if temperature == 0:
        return np.full(numbers.shape, np.argmax(logits), np.int64)
    return _places(np.exp((logits - logits.max()) / temperature), numbers)


def choose(logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float, number: float) -> int:
    """Pick a token by inverting the cumulative distribution, in the order of ids, at `number` in [0, 1).

    Temperature comes first, then top_k, then top_p; among equal logits the lower id is kept first.

    Args:
        logits: float64 (vocabulary,).
        temperature: 0 is greedy.
        top_k: -1 is off.
        top_p: 1 is off.
        number: where to cut.
    """
    if temperature == 0:
        return int(np.argmax(logits))
    weights = np.exp((logits - logits.max()) / temperature)
    if top_k == -1 and top_p == 1:
        kept = None
    else:
        kept = np.argsort(-logits, kind="stable")[: None if top_k == -1 else top_k]
        if top_p < 1:
            cumulative = np.cumsum(weights[kept])
            kept = kept[: int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1]
        kept = np.sort(kept)
        weights = weights[kept]
    place = int(_places(weights, np.array([number]))[0])
    return place if kept is None else int(kept[place])


def _places(weights: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Where the cumulative sum of the weights passes each of the numbers, which are shares of the whole."""
    cumulative = np.cumsum(weights)
    # Rounding may carry the product up to the whole sum; the first place that has it is the last of any weight.
    places = np.searchsorted(cumulative, numbers * cumulative[-1], side="right")
    return np.minimum(places, np.searchsorted(cumulative, cumulative[-1]))


def log_sum_exp(logits: NDArray[np.float64]) -> float:
    """The logarithm of the sum over the vocabulary."""
    highest = logits.max()
    return float(highest + np.log(np.exp(logits - highest).sum()))
