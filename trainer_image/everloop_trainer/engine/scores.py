"""Log-probabilities of given tokens, of the likeliest and of drawn ones, at positions of a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.choosing import draw, log_sum_exp, uniforms, without
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.requests import SampleRequest
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

    def skip(self, k: int) -> None:
        """Take in a position of which nothing is told."""
        self.ids.append(np.zeros(k, np.int32))
        self.logprobs.append(np.full(k, EMPTY_LOGPROB, np.float32))

    def to_proto(self, k: int, length: int) -> Any:
        """As the last of `length` positions; those before them are empty."""
        empty = length - len(self.ids)
        ids = np.concatenate([np.zeros(empty * k, np.int32), *self.ids])
        logprobs = np.concatenate([np.full(empty * k, EMPTY_LOGPROB, np.float32), *self.logprobs])
        return tinker_public.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)


@dataclass(slots=True)
class Drawn:
    """Tokens that were drawn for each position: ids int64 (k,) and log-probabilities float32 (k,)."""

    ids: list[NDArray[np.int64]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, ids: NDArray[np.int64], logprobs: NDArray[np.float64]) -> None:
        """Take in those of a position, (k,) both."""
        self.ids.append(ids)
        self.logprobs.append(logprobs.astype(np.float32))

    def to_proto(self, k: int) -> Any:
        """As the SDK's PromptAltTokens: two matrices (positions, k)."""
        shape = (len(self.ids), k)
        ids = b"".join(each.tobytes() for each in self.ids)
        logprobs = b"".join(each.tobytes() for each in self.logprobs)
        return tinker_public.PromptAltTokens(
            tokens=tinker_public.Tensor(dense=ids, dtype=tinker_public.DTYPE_INT64, shape=shape),
            logprobs=tinker_public.Tensor(dense=logprobs, dtype=tinker_public.DTYPE_FLOAT32, shape=shape),
        )


@dataclass(slots=True)
class PromptScores:
    """What a request asked of its prompt.

    Attributes:
        logprobs: of each of its last tokens, float32 (scored,).
        likeliest: in the place of each of these.
        targets: of the named tokens, float32 (cells,); 0 where none is named.
        drawn: for each position but the first, if any are wanted.
    """

    logprobs: NDArray[np.float32]
    likeliest: Likeliest
    targets: NDArray[np.float32]
    drawn: Drawn

    def tell(self, response: Any, request: SampleRequest) -> None:
        """Put what was asked for into a SampleResponse."""
        length = len(request.prompt)
        if request.prompt_logprobs:
            before = np.full(length - request.scored, np.nan, np.float32)
            values = np.concatenate([before, self.logprobs])
            values[request.seen()] = np.nan
            response.prompt_logprobs = values.tobytes()
        if k := request.topk_prompt_logprobs:
            response.topk_prompt_logprobs.CopyFrom(self.likeliest.to_proto(k, length))
        if request.target_prompt_logprobs is not None:
            response.target_prompt_logprobs.CopyFrom(request.target_prompt_logprobs.to_proto(self.targets))
        if k := request.prompt_alt_tokens_k:
            response.prompt_alt_tokens.CopyFrom(self.drawn.to_proto(k))


def target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities (n, K) of targets int64 (n, K), and the normaliser (n, 1), of logits (n, vocabulary)."""
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    return logits.gather(1, targets) - normaliser, normaliser


def score_prompt(base: BaseModel, hidden: torch.Tensor, request: SampleRequest) -> PromptScores:
    """Score as many positions at the end of a prompt as the request asks something of, which may be none.

    `hidden` are the states (length, hidden) that its tokens have with whichever adapter is in use.

    Raises ContentError if the logits are not finite.
    """
    prompt, length, wanted = request.prompt, len(request.prompt), request.target_prompt_logprobs
    named, rows = (np.empty(0, np.int64),) * 2 if wanted is None else wanted.cells()
    scores = PromptScores(
        logprobs=np.zeros(request.scored, np.float32),
        likeliest=Likeliest(),
        targets=np.zeros(0 if wanted is None else wanted.ids.size, np.float32),
        drawn=Drawn(),
    )
    first_scored = length - request.scored
    first = min([first_scored, 1 if request.prompt_alt_tokens_k else length, *(rows[:1] + 1).tolist()])
    for start in range(first, length, HEAD_TOKENS):
        stop = min(start + HEAD_TOKENS, length)
        logits = base.logits(hidden[start - 1 : stop - 1])
        if not torch.isfinite(logits).all():
            raise ContentError("the logits of these weights are not finite: they have diverged")
        own, normaliser = target_logprobs(logits, torch.tensor(list(prompt[start:stop]))[:, None])
        if stop > first_scored:
            scores.logprobs[max(start - first_scored, 0) : stop - first_scored] = own[max(first_scored - start, 0) :, 0]
        here = slice(*np.searchsorted(rows, (start - 1, stop - 1)))
        if wanted is not None:
            at = torch.from_numpy(rows[here] - (start - 1))
            ids = torch.from_numpy(wanted.ids[named[here]])
            scores.targets[named[here]] = (logits[at, ids] - normaliser[at, 0]).numpy()
        _tell_tokens(base, scores, request, start, logits)
    return scores


def _tell_tokens(
    base: BaseModel, scores: PromptScores, request: SampleRequest, start: int, logits: torch.Tensor
) -> None:
    """Add the likeliest and the drawn tokens of the positions from `start` on, whose logits these are."""
    k, first_scored = request.topk_prompt_logprobs, len(request.prompt) - request.scored
    if not (k or request.prompt_alt_tokens_k):
        return
    seen = request.seen()
    for position, row in enumerate(logits.double().numpy(), start):
        normaliser = log_sum_exp(row)
        if k and position >= first_scored:
            if seen[position]:
                scores.likeliest.skip(k)
            else:
                scores.likeliest.add(row, normaliser, k)
        if request.prompt_alt_tokens_k:
            numbers = uniforms(request.seed, position, request.prompt_alt_tokens_k)
            ids = draw(without(row, base.reserved), request.temperature, numbers)
            scores.drawn.add(ids, row[ids] - normaliser)
