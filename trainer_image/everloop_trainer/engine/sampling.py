"""Sampling: many requests for several adapters at a time, a token of each sample a step (Yu et al., 2022, Orca).

What a sample is does not depend on its company: its random numbers are a function of (seed, index of the sample,
position), its attention of its own keys and values (attention.py), and linear layers run on a multiple of 8 rows, for
which the bits of a row are the same whatever is in the others and however many multiples there are.

Reported log-probabilities are those of the model itself (softmax of the logits at temperature 1, before top_k and
top_p): what `forward` reports for the same tokens, so that importance ratios against training are exact. Tokens that
stand for parts of images are never picked, and count in that softmax as they do in `forward`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from everloop_trainer.engine.attention import Row
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.choosing import choose, log_sum_exp, uniform, without
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.lora import Adapter
from everloop_trainer.engine.requests import SampleRequest, StopRule, stop_rule
from everloop_trainer.engine.scores import Likeliest, PromptScores, score_prompt
from everloop_trainer.tinker_proto import tinker_public

MOST_ROWS = 64
"""Samples that are decoded side by side; the others wait for a place."""
_TAIL_TOKENS = 4
"""So many tokens more than a stop string has bytes are looked at: a token is at least one byte of text."""


@dataclass(slots=True)
class _Completion:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: Likeliest = field(default_factory=Likeliest)
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A prompt that has been run: keys and values, `offset` as of a Row, and logits float64 of what follows it."""

    cache: DynamicCache
    offset: int
    logits: NDArray[np.float64]


@dataclass(slots=True, eq=False)
class _Job:
    """One request. `prefilled`: what its samples begin with, until the last one has a place."""

    key: int
    share: str
    request: SampleRequest
    adapter: Adapter | None
    rule: StopRule
    limit: int
    completions: list[_Completion]
    begun: int = 0
    ended: int = 0
    prefilled: _Prefilled | None = None
    scores: PromptScores | None = None


@dataclass(slots=True)
class _Place:
    job: _Job
    index: int
    row: Row


@dataclass(frozen=True, slots=True)
class Sampled:
    """A serialised SampleResponse, and how many tokens it took, by kind."""

    body: bytes
    usage: dict[str, int]


Answer = tuple[int, Sampled | ContentError]


class Sampler:
    """Requests under way. `add` takes one, and each `step` gives every sample that has a place one more token."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._waiting: dict[str, deque[_Job]] = {}
        """By share, in the order in which these come to their turn; none is empty."""
        self._places: list[_Place] = []

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._places)

    def add(self, key: int, request: SampleRequest, adapter: Adapter | None, share: str = "") -> None:
        """Take a request, whose answer will have this key. Raises ContentError for bad content.

        Shares take turns at places that become free, sample by sample; within a share the first comes first.
        """
        limit = request.check(self._base)
        rule = stop_rule(request.stop, self._base.eos_ids, self._base.vocab_size)
        completions = [_Completion() for _ in range(request.num_samples)]
        job = _Job(key, share, request, adapter, rule, limit, completions)
        self._waiting.setdefault(share, deque()).append(job)

    def give_way(self) -> int:
        """Let go of the youngest of those under way, for want of memory, and return its key."""
        filling = self._waiting and len(self._places) < MOST_ROWS
        job = self._next() if filling else self._places[-1].job
        self._let_go(job)
        return job.key

    def cancel(self, key: int) -> None:
        """Let go of a request, which has no answer then; nothing happens if it isn't under way."""
        waiting = [job for jobs in self._waiting.values() for job in jobs]
        for job in [*waiting, *(place.job for place in self._places)]:
            if job.key == key:
                self._let_go(job)

    @torch.no_grad()
    def step(self, needed: Callable[[], bool] = lambda: False) -> list[Answer]:
        """Do one step and return what has ended: a serialised SampleResponse, or why there is none.

        After each prompt that has been run, `needed` says whether somebody waits who has nothing to do with samples:
        then the step ends there, and no sample has gone on.
        """
        answers, interrupted = self._fill_places(needed)
        if self._places and not interrupted:
            logits = self._base.decode(
                [place.row for place in self._places], [each.job.adapter for each in self._places]
            )
            places, self._places = self._places, []
            failed: list[_Job] = []
            for place, values in zip(places, logits, strict=True):
                if place.job in failed:
                    continue
                try:
                    token = self._go_on(place.job, place.index, _finite(values))
                except ContentError as error:
                    failed.append(place.job)
                    answers.append((place.job.key, error))
                    continue
                if token is None:
                    answers += self._end(place.job)
                else:
                    place.row.last = token
                    self._places.append(place)
            for job in failed:
                self._let_go(job)
        return answers

    def _fill_places(self, needed: Callable[[], bool]) -> tuple[list[Answer], bool]:
        """Begin samples as far as there are places, or until somebody is in need of the engine."""
        answers: list[Answer] = []
        while self._waiting and len(self._places) < MOST_ROWS:
            job = self._next()
            fresh = job.prefilled is None
            try:
                if job.prefilled is None:
                    job.prefilled = self._prefill(job)
                begun = job.prefilled
                token = self._go_on(job, job.begun, begun.logits)
            except ContentError as error:
                answers.append((job.key, error))
                self._let_go(job)
                continue
            if token is None:
                answers += self._end(job)
            else:
                self._places.append(_Place(job, job.begun, Row(begun.cache, token, begun.offset)))
            job.begun += 1
            self._take_turns(job)
            if fresh and needed():
                return answers, True
        return answers, False

    def _next(self) -> _Job:
        return next(iter(self._waiting.values()))[0]

    def _take_turns(self, job: _Job) -> None:
        """One of its samples has been begun: the other shares come first now."""
        jobs = self._waiting.pop(job.share)
        if job.begun == len(job.completions):
            job.prefilled = None
            jobs.popleft()
        if jobs:
            self._waiting[job.share] = jobs

    def _prefill(self, job: _Job) -> _Prefilled:
        """Run a prompt, alone: its bits do not depend on other prompts either."""
        self._base.use(job.adapter)
        cache = DynamicCache()
        request = job.request
        prompt = torch.tensor([list(request.prompt)], dtype=torch.int64)
        sight = self._base.see(prompt, [request.images])
        hidden = self._base.hidden(prompt, cache, sight=sight)
        job.scores = score_prompt(self._base, hidden[0], request)
        offset = 0 if sight is None else sight.offsets[0]
        return _Prefilled(cache, offset, _finite(self._base.logits(hidden[0, -1:])[0]))

    def _go_on(self, job: _Job, index: int, logits: NDArray[np.float64]) -> int | None:
        """Add the next token to a completion and return it, or None if that was the last one."""
        request, completion = job.request, job.completions[index]
        number = uniform(request.seed, index, len(completion.tokens))
        allowed = without(logits, self._base.reserved)
        token = choose(allowed, request.temperature, request.top_k, request.top_p, number)
        completion.tokens.append(token)
        normaliser = log_sum_exp(logits)
        completion.logprobs.append(float(logits[token] - normaliser))
        if request.topk_sample_logprobs:
            completion.likeliest.add(logits, normaliser, request.topk_sample_logprobs)
        completion.stopped = token in job.rule.ids or self._holds(completion.tokens, job.rule.texts)
        return None if completion.stopped or len(completion.tokens) == job.limit else token

    def _end(self, job: _Job) -> list[Answer]:
        """One more completion has ended: the answer, if it was the last one."""
        job.ended += 1
        if job.ended < len(job.completions):
            return []
        request, scores = job.request, job.scores
        assert scores is not None, "a sample begins with its prompt"
        response = tinker_public.SampleResponse()
        for completion in job.completions:
            sequence = response.sequences.add(
                stop_reason=tinker_public.STOP_REASON_STOP if completion.stopped else tinker_public.STOP_REASON_LENGTH,
                tokens=np.asarray(completion.tokens, np.int32).tobytes(),
                logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
            )
            if k := request.topk_sample_logprobs:
                sequence.topk_sampled_logprobs.CopyFrom(completion.likeliest.to_proto(k, len(completion.tokens)))
        scores.tell(response, request)
        usage = {"prompt": len(request.prompt), "sampled": sum(len(each.tokens) for each in job.completions)}
        return [(job.key, Sampled(bytes(response.SerializeToString(deterministic=True)), usage))]

    def _let_go(self, job: _Job) -> None:
        self._places = [place for place in self._places if place.job is not job]
        jobs = self._waiting.get(job.share, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.share]

    def _holds(self, tokens: Sequence[int], texts: Sequence[str]) -> bool:
        if not texts:
            return False
        tail = tokens[-max(len(text.encode()) for text in texts) - _TAIL_TOKENS :]
        text = self._base.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(wanted in text for wanted in texts)


def _finite(logits: torch.Tensor) -> NDArray[np.float64]:
    """Return float64 (vocabulary,)."""
    values: NDArray[np.float64] = logits.double().numpy()
    if not np.isfinite(values).all():
        raise ContentError("the logits of these weights are not finite: they have diverged")
    return values
