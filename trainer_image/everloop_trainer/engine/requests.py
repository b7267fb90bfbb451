"""What a client asks to be sampled, and when a completion ends. Refusals name the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.images import Image
from everloop_trainer.engine.inputs import not_text
from everloop_trainer.engine.targets import PromptTargets

MOST_LIKELIEST = 256
MOST_STOP_TEXTS = 256
"""Each is looked for after each token."""


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
        prompt_logprobs: whether the prompt's tokens are scored.
        prompt_logprobs_last_n: only so many of them, from the end; None: all but the first, which follows nothing.
        topk_prompt_logprobs: so many of the likeliest tokens are told at each of these positions.
        topk_sample_logprobs: and so many at each sampled one.
        target_prompt_logprobs: tokens to be scored at positions of the prompt, whatever stands there.
        prompt_alt_tokens_k: so many tokens are drawn, at `temperature` from the whole vocabulary, for each position of
            the prompt but the first.
        images: those that tokens of the prompt stand for, in their order. Of these tokens nothing is told.
    """

    prompt: Sequence[int]
    num_samples: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str] | Sequence[int] | None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: PromptTargets | None = None
    prompt_alt_tokens_k: int = 0
    images: Sequence[Image] = ()

    def seen(self) -> NDArray[np.bool_]:
        """Which tokens of the prompt (length,) stand for parts of images."""
        marked = np.zeros(len(self.prompt), np.bool_)
        for image in self.images:
            marked[image.start : image.start + image.tokens] = True
        return marked

    @property
    def scored(self) -> int:
        """How many tokens at the end of the prompt are scored."""
        if not (self.prompt_logprobs or self.topk_prompt_logprobs):
            return 0
        return len(self.prompt) - 1 if self.prompt_logprobs_last_n is None else self.prompt_logprobs_last_n

    def check(self, base: BaseModel) -> int:
        """Return the most tokens one completion may have; raise ContentError naming the field that is wrong."""
        if not self.prompt:
            raise ContentError("prompt: must hold at least one token")
        no_text = frozenset() if self.images else frozenset(base.reserved.tolist())
        for index, token in enumerate(self.prompt):
            if token in no_text:
                raise ContentError(f"prompt[{index}]: {not_text(token)}")
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
        most = min(MOST_LIKELIEST, base.vocab_size)
        for name, k in (
            ("topk_prompt_logprobs", self.topk_prompt_logprobs),
            ("topk_sample_logprobs", self.topk_sample_logprobs),
            ("prompt_alt_tokens_k", self.prompt_alt_tokens_k),
        ):
            if not 0 <= k <= most:
                raise ContentError(f"{name}: must be 0 to {most}, got {k}")
        if self.target_prompt_logprobs is not None:
            self.target_prompt_logprobs.check(length, base.vocab_size)
        last = self.prompt_logprobs_last_n
        if last is not None and not self.prompt_logprobs:
            raise ContentError("prompt_logprobs_last_n: needs prompt_logprobs")
        if last is not None and not 1 <= last < length:
            raise ContentError(
                f"prompt_logprobs_last_n: must be 1 to {length - 1}, the prompt's length less 1, got {last}"
            )
        return wanted


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a completion ends: at one of `ids`, or once its text holds one of `texts`."""

    ids: frozenset[int]
    texts: tuple[str, ...]


def stop_rule(stop: str | Sequence[str] | Sequence[int] | None, eos_ids: frozenset[int], vocab_size: int) -> StopRule:
    """Read the SDK's `stop`. Raises ContentError if it is neither None, text, texts nor ids of the vocabulary."""
    if stop is None:
        return StopRule(eos_ids, ())
    values = [stop] if isinstance(stop, str) else list(stop)
    texts = tuple(value for value in values if isinstance(value, str))
    ids = frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))
    if len(texts) == len(values) and values:
        if not all(texts):
            raise ContentError("sampling_params.stop: a stop string must not be empty")
        if len(texts) > MOST_STOP_TEXTS:
            raise ContentError(f"sampling_params.stop: at most {MOST_STOP_TEXTS} strings, got {len(texts)}")
        return StopRule(eos_ids, texts)
    if texts or any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        raise ContentError("sampling_params.stop: must be a string, a list of strings, or a list of token ids")
    for index, token in enumerate(values):
        if isinstance(token, int) and not 0 <= token < vocab_size:
            raise ContentError(
                f"sampling_params.stop[{index}]: token id {token} is outside the vocabulary (0 to {vocab_size - 1})"
            )
    return StopRule(ids, ())
