"""Sampling, one request at a time with a KV cache.

Each sample of a request is decoded alone, on a copy of the prompt's cache, and its random numbers are a function of
(seed, index of the sample, position) alone: the tokens do not depend on how many samples were asked for, nor on what
ran before.

Reported log-probabilities are those of the model itself (softmax of the logits at temperature 1, before top_k and
top_p): what `forward` reports for the same tokens, so that importance ratios against training are exact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.tinker_proto import tinker_public


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
    prompt_cache = DynamicCache()
    logits = _next_logits(base, request.prompt, prompt_cache)
    response = tinker_public.SampleResponse()
    for index in range(request.num_samples):
        completion = _complete(base, request, index, copy.deepcopy(prompt_cache), logits, rule, limit)
        response.sequences.add(
            stop_reason=tinker_public.STOP_REASON_STOP if completion.stopped else tinker_public.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.tokens, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
    return bytes(response.SerializeToString(deterministic=True))


def _complete(
    base: BaseModel,
    request: SampleRequest,
    index: int,
    cache: Any,
    logits: NDArray[np.float64],
    rule: StopRule,
    limit: int,
) -> _Completion:
    completion = _Completion()
    while True:
        position = len(completion.tokens)
        token = choose(logits, request, uniform(request.seed, index, position))
        completion.tokens.append(token)
        completion.logprobs.append(float(logits[token] - _log_sum_exp(logits)))
        if token in rule.ids or (rule.texts and _holds(base, completion.tokens, rule.texts)):
            completion.stopped = True
            return completion
        if len(completion.tokens) == limit:
            return completion
        logits = _next_logits(base, [token], cache)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1) that depends on its three arguments alone (Philox, Salmon et al., 2011)."""
    key = np.array([seed % 2**64, sample_index], np.uint64)
    counter = np.array([position, 0, 0, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def choose(logits: NDArray[np.float64], request: SampleRequest, number: float) -> int:
    """Pick a token by inverting the cumulative distribution at `number` in [0, 1); logits are float64 (vocab,).

    Temperature comes first, then top_k, then top_p; among equal logits the lower id comes first.
    """
    if request.temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    if request.top_k != -1:
        order = order[: request.top_k]
    scaled = (logits[order] - logits[order[0]]) / request.temperature
    cumulative = np.cumsum(np.exp(scaled))
    if request.top_p < 1:
        kept = int(np.searchsorted(cumulative, request.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:kept]
    return int(order[np.searchsorted(cumulative, number * cumulative[-1], side="right")])


def _next_logits(base: BaseModel, tokens: Sequence[int], cache: Any) -> NDArray[np.float64]:
    hidden = base.hidden(torch.tensor([list(tokens)], dtype=torch.int64), cache)
    logits: NDArray[np.float64] = base.logits(hidden[0, -1:])[0].double().numpy()
    if not np.isfinite(logits).all():
        raise ContentError("the logits of these weights are not finite: they have diverged")
    return logits


def _log_sum_exp(logits: NDArray[np.float64]) -> float:
    highest = logits.max()
    return float(highest + np.log(np.exp(logits - highest).sum()))


def _holds(base: BaseModel, tokens: Sequence[int], texts: Sequence[str]) -> bool:
    text = base.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(wanted in text for wanted in texts)
