"""Sampling: one prefill of a prompt, then its samples side by side, a token of each a step.

What a sample is does not depend on its company: its random numbers are a function of (seed, index of the sample,
position), its attention of its own keys and values (attention.py), and linear layers run on a multiple of 8 rows, for
which the bits of a row are the same whatever is in the others and however many multiples there are.

Reported log-probabilities are those of the model itself (softmax of the logits at temperature 1, before top_k and
top_p): what `forward` reports for the same tokens, so that importance ratios against training are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from everloop_trainer.engine.attention import Row
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.choosing import choose, log_sum_exp, uniform
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.tinker_proto import tinker_public

MOST_ROWS = 32
"""Samples that are decoded side by side; the others wait for a place."""
_TAIL_TOKENS = 4
"""So many tokens more than a stop string has bytes are looked at: a token is at least one byte of text."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What to sample.

    Attributes:
        prompt: token ids.
        num_samples: completions wanted.
        max_tokens: most tokens of one completion; None: up to the context limit.
        temperature: 0 is greedy.
        top_p: nucleus, 1 is off.
        top_k: -1 is off.
        seed: 64 bits.
        stop: None: at EOS. Strings: at any of them, or EOS. Token ids: at these and nothing else; an empty list never
            stops. Whatever stops a completion is part of it.
    """

    prompt: Sequence[int]
    num_samples: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str] | Sequence[int] | None

    def check(self, base: BaseModel) -> int:
        """Return the most tokens one completion may have; raise ContentError naming the field that is wrong."""
        if not self.prompt:
            raise ContentError("prompt: must hold at least one token")
        for index, token in enumerate(self.prompt):
            if not 0 <= token < base.vocab_size:
                raise ContentError(
                    f"prompt[{index}]: token id {token} is outside the vocabulary (0 to {base.vocab_size - 1})"
                )
        if self.num_samples < 1:
            raise ContentError(f"num_samples: must be at least 1, got {self.num_samples}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ContentError(f"sampling_params.max_tokens: must be at least 1, got {self.max_tokens}")
        length = len(self.prompt)
        wanted = self.max_tokens if self.max_tokens is not None else max(base.max_sequence_length - length, 1)
        if length + wanted > base.max_sequence_length:
            raise ContentError(
                f"prompt: prompt length ({length}) + max_tokens ({wanted}) exceeds the context window"
                f" ({base.max_sequence_length} tokens)"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ContentError(f"sampling_params.temperature: must be finite and not negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ContentError(f"sampling_params.top_p: must be above 0 and at most 1, got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ContentError(f"sampling_params.top_k: must be -1 or at least 1, got {self.top_k}")
        return wanted


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a completion ends: at one of `ids`, or once its text holds one of `texts`."""

    ids: frozenset[int]
    texts: tuple[str, ...]


def stop_rule(stop: str | Sequence[str] | Sequence[int] | None, eos_ids: frozenset[int]) -> StopRule:
    """Read the SDK's `stop`. Raises ContentError if it is neither None, text, texts nor token ids."""
    if stop is None:
        return StopRule(eos_ids, ())
    values = [stop] if isinstance(stop, str) else list(stop)
    texts = tuple(value for value in values if isinstance(value, str))
    ids = frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))
    if len(texts) == len(values) and values:
        if not all(texts):
            raise ContentError("sampling_params.stop: a stop string must not be empty")
        return StopRule(eos_ids, texts)
    if texts or any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        raise ContentError("sampling_params.stop: must be a string, a list of strings, or a list of token ids")
    return StopRule(ids, ())


@dataclass(slots=True)
class _Completion:
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


@torch.no_grad()
def sample(base: BaseModel, request: SampleRequest) -> bytes:
    """Sample from whichever adapter is in use and return a serialised SampleResponse.

    Raises ContentError for bad content, or if the model's logits are not finite.
    """
    limit = request.check(base)
    rule = stop_rule(request.stop, base.eos_ids)
    cache = DynamicCache()
    hidden = base.hidden(torch.tensor([list(request.prompt)], dtype=torch.int64), cache)
    first = _finite(base.logits(hidden[0, -1:]))[0]
    completions = [_Completion(index) for index in range(request.num_samples)]
    waiting = completions[::-1]
    running: list[tuple[_Completion, Row]] = []
    while waiting or running:
        while waiting and len(running) < MOST_ROWS:
            completion = waiting.pop()
            if _go_on(base, request, completion, first, rule, limit):
                running.append((completion, Row(cache, completion.tokens[-1])))
        if running:
            logits = _finite(base.decode([row for _, row in running]))
            running = [
                (completion, row)
                for (completion, row), values in zip(running, logits, strict=True)
                if _go_on(base, request, completion, values, rule, limit, row)
            ]
    response = tinker_public.SampleResponse()
    for completion in completions:
        response.sequences.add(
            stop_reason=tinker_public.STOP_REASON_STOP if completion.stopped else tinker_public.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.tokens, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
    return bytes(response.SerializeToString(deterministic=True))


def _go_on(
    base: BaseModel,
    request: SampleRequest,
    completion: _Completion,
    logits: NDArray[np.float64],
    rule: StopRule,
    limit: int,
    row: Row | None = None,
) -> bool:
    """Add the next token to a completion, and to its row, and say whether more are to come."""
    number = uniform(request.seed, completion.index, len(completion.tokens))
    token = choose(logits, request.temperature, request.top_k, request.top_p, number)
    completion.tokens.append(token)
    completion.logprobs.append(float(logits[token] - log_sum_exp(logits)))
    completion.stopped = token in rule.ids or _holds(base, completion.tokens, rule.texts)
    if row is not None:
        row.last = token
    return not completion.stopped and len(completion.tokens) < limit


def _finite(logits: torch.Tensor) -> NDArray[np.float64]:
    """Return float64 (rows, vocabulary)."""
    values: NDArray[np.float64] = logits.double().numpy()
    if not np.isfinite(values).all():
        raise ContentError("the logits of these weights are not finite: they have diverged")
    return values


def _holds(base: BaseModel, tokens: Sequence[int], texts: Sequence[str]) -> bool:
    if not texts:
        return False
    tail = tokens[-max(len(text.encode()) for text in texts) - _TAIL_TOKENS :]
    text = base.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(wanted in text for wanted in texts)
