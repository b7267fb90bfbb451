"""Log-probabilities of given tokens, and of the likeliest ones, at positions of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.choosing import log_sum_exp
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.tinker_proto import tinker_public

HEAD_TOKENS = 256
"""Positions whose logits (float32, positions x vocabulary) exist at once."""
EMPTY_LOGPROB = -99999.0
"""With token 0, of a position that has none (SDK, TopkLogprobs)."""


@dataclass(slots=True)
class Likeliest:
    """The k likeliest tokens of each position, likeliest first: ids int32 (k,) and log-probabilities float32 (k,)."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, logits: NDArray[np.float64], normaliser: float, k: int) -> None:
        """Take in a position: logits float64 (vocabulary,) and their log_sum_exp. Of equals the lower id is first."""
        top = np.argpartition(-logits, k - 1)[:k]
        top = top[np.lexsort((top, -logits[top]))]
        self.ids.append(top.astype(np.int32))
        self.logprobs.append((logits[top] - normaliser).astype(np.float32))

    def to_proto(self, k: int, length: int) -> Any:
        """As the last of `length` positions; those before them are empty."""
        empty = length - len(self.ids)
        ids = np.concatenate([np.zeros(empty * k, np.int32), *self.ids])
        logprobs = np.concatenate([np.full(empty * k, EMPTY_LOGPROB, np.float32), *self.logprobs])
        return tinker_public.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of the last tokens of a prompt: log-probability of each, float32 (n,), and the likeliest in its place."""

    logprobs: NDArray[np.float32]
    likeliest: Likeliest


def target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities (n, K) of targets int64 (n, K), and the normaliser (n, 1), of logits (n, vocabulary)."""
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    return logits.gather(1, targets) - normaliser, normaliser


def score_prompt(base: BaseModel, hidden: torch.Tensor, prompt: Sequence[int], count: int, k: int) -> PromptScores:
    """Score the last `count` tokens of a prompt, which may be none.

    `hidden` are the states (length, hidden) that its tokens have with whichever adapter is in use.

    Raises ContentError if the logits are not finite.
    """
    likeliest, found = Likeliest(), [np.empty(0, np.float32)]
    for start in range(len(prompt) - count, len(prompt), HEAD_TOKENS):
        stop = min(start + HEAD_TOKENS, len(prompt))
        logits = base.logits(hidden[start - 1 : stop - 1])
        if not torch.isfinite(logits).all():
            raise ContentError("the logits of these weights are not finite: they have diverged")
        targets = torch.tensor(list(prompt[start:stop]))[:, None]
        found.append(target_logprobs(logits, targets)[0][:, 0].numpy())
        if k:
            for row in logits.double().numpy():
                likeliest.add(row, log_sum_exp(row), k)
    return PromptScores(np.concatenate(found), likeliest)
