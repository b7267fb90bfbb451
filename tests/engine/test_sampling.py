"""Sampling: the right distribution, the same bits again, and an end where the request wants it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.choosing import choose, uniform
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.lora import Adapter, LoraSpec
from everloop_trainer.engine.requests import SampleRequest, StopRule, stop_rule
from everloop_trainer.engine.sampling import MOST_ROWS, Sampled, Sampler
from everloop_trainer.tinker_proto import tinker_public
from tests.engine.models import EOS
from tests.engine.reference import merged_logits, plain_model, randomise

PROMPT = (10, 20, 30, 40)
REQUEST = SampleRequest(PROMPT, 1, 12, 1.0, 1.0, -1, 3, ())
Sequences = list[tuple[list[int], list[float], str]]


def _answers(base: BaseModel, *requests: tuple[SampleRequest, Adapter | None]) -> dict[int, Sequences]:
    """What a sampler makes of requests that it has from the start, by their place among them."""
    sampler = Sampler(base)
    for key, (request, adapter) in enumerate(requests):
        sampler.add(key, request, adapter)
    return _finish(sampler)


def _finish(sampler: Sampler) -> dict[int, Sequences]:
    found = {}
    while sampler.busy:
        for key, answer in sampler.step():
            assert isinstance(answer, Sampled), answer
            found[key] = _read(answer)
    return found


def _read(answer: Sampled) -> Sequences:
    response = tinker_public.SampleResponse.FromString(answer.body)
    return [
        (
            np.frombuffer(sequence.tokens, np.int32).tolist(),
            np.frombuffer(sequence.logprobs, np.float32).tolist(),
            tinker_public.StopReason.Name(sequence.stop_reason),
        )
        for sequence in response.sequences
    ]


def _sample(base: BaseModel, request: SampleRequest) -> Sequences:
    return _answers(base, (request, None))[0]


def test_greedy_equals_generate(tiny_base: BaseModel, tiny_model: Path) -> None:
    """Temperature 0 gives the tokens that transformers generates."""
    ((tokens, _, _),) = _sample(tiny_base, replace(REQUEST, temperature=0.0))
    model = plain_model(tiny_model)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])
    expected = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    assert tokens == expected[0, 4:].tolist()


def test_logprobs_are_those_of_the_model(tiny_base: BaseModel, tiny_model: Path) -> None:
    """Whatever temperature, top_k and top_p chose, each logprob is that of a plain forward pass."""
    model = plain_model(tiny_model)
    request = replace(REQUEST, temperature=3.0, top_k=50, top_p=0.9, num_samples=2)
    for tokens, logprobs, _ in _sample(tiny_base, request):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0, 3:-1]
        expected = torch.log_softmax(logits, -1)[torch.arange(12), torch.tensor(tokens)]
        np.testing.assert_allclose(logprobs, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("company", [2, 3, 9, 64, 70])
@pytest.mark.parametrize("length", [1, 4, 250, 300])
def test_a_sample_does_not_depend_on_its_company(tiny_base: BaseModel, company: int, length: int) -> None:
    """The same bits alone and among others, more than are decoded side by side too; each sample differs."""
    prompt = [(index * 7) % 256 for index in range(length)]
    request = replace(REQUEST, prompt=prompt, temperature=2.0)
    alone = _sample(tiny_base, request)
    together = _sample(tiny_base, replace(request, num_samples=company))
    assert together[0] == alone[0]
    assert len({tuple(tokens) for tokens, _, _ in together}) == company
    assert _sample(tiny_base, replace(request, seed=4)) != alone


def test_samples_that_end_leave_the_others_as_they_are(tiny_base: BaseModel) -> None:
    """Stopping some of twelve early changes no token of the rest, nor of those that wait for their places."""
    request = replace(REQUEST, temperature=4.0, num_samples=70)
    whole = _sample(tiny_base, request)
    stops = tuple({tokens[position] for tokens, _, _ in whole[:6] for position in (3, 7)})
    cut = _sample(tiny_base, replace(request, stop=stops))
    assert len({len(tokens) for tokens, _, _ in cut}) > 2
    for (tokens, logprobs, _), (shorter, fewer, reason) in zip(whole, cut, strict=True):
        end = next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))
        assert (shorter, fewer) == (tokens[:end], logprobs[:end])
        assert (reason == "STOP_REASON_STOP") == (tokens[end - 1] in stops)


def _adapter(base: BaseModel, rank: int, unembed: bool = True) -> Adapter:
    adapter = Adapter(LoraSpec(rank, rank, train_mlp=True, train_attn=unembed, train_unembed=unembed), base.targets)
    adapter.initialise()
    randomise(adapter, rank)
    return adapter


def test_requests_for_different_adapters_are_as_if_alone(tiny_base: BaseModel) -> None:
    """Whoever shares a step, whoever comes and goes meanwhile: each has the bits that it has alone."""
    adapters = [None, _adapter(tiny_base, 1), _adapter(tiny_base, 4), _adapter(tiny_base, 16, unembed=False)]
    generator = np.random.default_rng(1)
    requests = [
        (
            replace(
                REQUEST,
                prompt=generator.integers(0, 256, 1 + 13 * (number % 7)).tolist(),
                num_samples=1 + number % 3,
                max_tokens=2 + number % 11,
                temperature=3.0,
                seed=number,
            ),
            adapters[number % 4],
        )
        for number in range(24)
    ]
    alone = {key: _answers(tiny_base, request)[0] for key, request in enumerate(requests)}
    assert len({repr(answer) for answer in alone.values()}) == len(requests)
    assert _answers(tiny_base, *requests) == alone

    sampler, late = Sampler(tiny_base), list(enumerate(requests))
    found: dict[int, Sequences] = {}
    while late or sampler.busy:
        for key, (request, adapter) in [late.pop(0) for _ in range(min(len(late), int(generator.integers(0, 3))))]:
            sampler.add(key, request, adapter)
        found |= {key: _read(answer) for key, answer in sampler.step() if isinstance(answer, Sampled)}
    assert found == alone


def test_an_adapter_is_what_a_plain_model_with_it_is(tiny_base: BaseModel, tiny_model: Path) -> None:
    """Log-probabilities in mixed company are those of W + (32 / rank) B A."""
    adapters = [_adapter(tiny_base, 2), _adapter(tiny_base, 8)]
    answers = _answers(tiny_base, *((replace(REQUEST, seed=index), each) for index, each in enumerate(adapters)))
    for index, adapter in enumerate(adapters):
        ((tokens, logprobs, _),) = answers[index]
        whole = torch.tensor([*PROMPT, *tokens])
        logits = merged_logits(plain_model(tiny_model), adapter, adapter.factors, whole)[3:-1]
        expected = torch.log_softmax(logits, -1)[torch.arange(12), torch.tensor(tokens)].detach()
        np.testing.assert_allclose(logprobs, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_weights_that_have_diverged_fail_their_own_requests_only(tiny_base: BaseModel) -> None:
    """In the prefill and later; those beside them go on as they were."""
    broken = _adapter(tiny_base, 4)
    broken.flat.fill_(float("nan"))
    later = _adapter(tiny_base, 4)
    sampler = Sampler(tiny_base)
    for key, adapter in enumerate((None, broken, later, None)):
        sampler.add(key, replace(REQUEST, num_samples=2), adapter)
    (refused,) = sampler.step()
    assert refused[0] == 1
    assert "not finite" in str(refused[1])
    later.flat.fill_(float("nan"))
    failed, found = {}, {}
    while sampler.busy:
        for key, answer in sampler.step():
            if isinstance(answer, ContentError):
                failed[key] = str(answer)
            else:
                found[key] = _read(answer)
    assert failed.keys() == {2}
    assert "not finite" in failed[2]
    assert found == {key: _sample(tiny_base, replace(REQUEST, num_samples=2)) for key in (0, 3)}


@pytest.mark.parametrize("length", [1, 2, 300])
def test_scores_are_those_of_a_plain_forward_pass(tiny_base: BaseModel, tiny_model: Path, length: int) -> None:
    """Of each prompt token but the first, with the likeliest beside it, over several slices of the head."""
    prompt = [(index * 11) % 256 for index in range(length)]
    request = replace(REQUEST, prompt=prompt, prompt_logprobs=True, topk_prompt_logprobs=5, topk_sample_logprobs=4)
    sampler = Sampler(tiny_base)
    sampler.add(0, request, None)
    answer = b""
    while sampler.busy:
        for _, ended in sampler.step():
            assert isinstance(ended, Sampled)
            answer = ended.body
    response = tinker_public.SampleResponse.FromString(answer)
    (sequence,) = response.sequences
    tokens = np.frombuffer(sequence.tokens, np.int32).tolist()
    with torch.no_grad():
        scores = torch.log_softmax(plain_model(tiny_model)(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0], -1)
    found = np.frombuffer(response.prompt_logprobs, np.float32)
    assert np.isnan(found[0])
    assert len(found) == length
    expected = scores[torch.arange(length - 1), torch.tensor(prompt[1:], dtype=torch.int64)].numpy()
    np.testing.assert_allclose(found[1:], expected, rtol=1e-4, atol=1e-4)
    for told, k, first, empty in (
        (response.topk_prompt_logprobs, 5, 0, 1),
        (sequence.topk_sampled_logprobs, 4, length - 1, 0),
    ):
        ids = np.frombuffer(told.token_ids, np.int32).reshape(told.length, told.k)
        logprobs = np.frombuffer(told.logprobs, np.float32).reshape(told.length, told.k)
        assert told.k == k
        assert (ids[:empty] == 0).all()
        assert (logprobs[:empty] == -99999.0).all()
        top = scores[first : first + told.length - empty].topk(k)
        np.testing.assert_allclose(logprobs[empty:], top.values.numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(ids[empty:], top.indices.numpy())


def test_the_youngest_gives_way(tiny_base: BaseModel) -> None:
    """Whoever is let go for want of memory is the one that came last of those under way."""
    sampler = Sampler(tiny_base)
    for key in range(3):
        sampler.add(key, REQUEST, None)
    sampler.step()
    assert sampler.give_way() == 2
    assert _finish(sampler) == {key: _sample(tiny_base, REQUEST) for key in (0, 1)}


def test_a_cancelled_request_leaves_the_others_as_they_are(tiny_base: BaseModel) -> None:
    """Whether all, some or none of its samples have a place; what it held is free for those that wait."""
    request = replace(REQUEST, temperature=3.0, num_samples=30)
    expected = _sample(tiny_base, request)
    for cancelled in range(4):
        sampler = Sampler(tiny_base)
        for key in range(4):
            sampler.add(key, request, None)
        sampler.step()
        sampler.cancel(cancelled)
        sampler.cancel(cancelled)
        sampler.cancel(99)
        assert _finish(sampler) == {key: expected for key in range(4) if key != cancelled}


def test_shares_take_turns_at_places_that_become_free(tiny_base: BaseModel) -> None:
    """One that has asked for thousands of samples keeps no other waiting for longer than one of them takes."""
    sampler, greedy = Sampler(tiny_base), replace(REQUEST, num_samples=3 * MOST_ROWS)
    for key in range(2):
        sampler.add(key, greedy, None, "greedy")
    sampler.step()
    for key, share in ((2, "modest"), (3, "modest"), (4, "other")):
        sampler.add(key, replace(REQUEST, seed=key), None, share)
    ended = [key for _ in range(2 * 12) for key, _ in sampler.step()]
    assert ended == [2, 4, 3], "those come at the first places, in the order of turns"
    assert _finish(sampler) == {key: _sample(tiny_base, greedy) for key in range(2)}


def test_prompts_give_way_to_whoever_needs_the_engine(tiny_base: BaseModel) -> None:
    """Between two of them, however many there are; what is sampled is the same."""
    sampler = Sampler(tiny_base)
    for key in range(4):
        sampler.add(key, replace(REQUEST, seed=key), None)
    for begun in range(1, 4):
        assert sampler.step(lambda: True) == []
        assert len(sampler._places) == begun
        assert {len(place.job.completions[0].tokens) for place in sampler._places} == {1}
    assert _finish(sampler) == {key: _sample(tiny_base, replace(REQUEST, seed=key)) for key in range(4)}


def test_tokens_are_counted(tiny_base: BaseModel) -> None:
    """A prompt once, however many samples it has; of each sample what was drawn."""
    sampler = Sampler(tiny_base)
    sampler.add(0, replace(REQUEST, num_samples=3), None)
    (ended,) = [answer for _ in range(12) for _, answer in sampler.step()]
    assert isinstance(ended, Sampled)
    assert ended.usage == {"prompt": 4, "sampled": 3 * 12}


def test_end_of_text(tiny_base: BaseModel) -> None:
    """None stops at EOS, which is included; an empty list does not stop there; ids stop at themselves."""
    greedy = replace(REQUEST, temperature=0.0)
    ((tokens, _, reason),) = _sample(tiny_base, greedy)
    assert reason == "STOP_REASON_LENGTH"
    assert len(tokens) == 12
    first = tokens.index(tokens[5])
    assert _sample(tiny_base, replace(greedy, stop=(tokens[5],)))[0][0] == tokens[: first + 1]
    assert _sample(tiny_base, replace(greedy, stop=(tokens[5],)))[0][2] == "STOP_REASON_STOP"
    assert tiny_base.eos_ids == {EOS}
    tiny_base.eos_ids = frozenset({tokens[5]})
    try:
        assert _sample(tiny_base, replace(greedy, stop=None))[0][0] == tokens[: first + 1]
        assert _sample(tiny_base, replace(greedy, stop="never!"))[0][0] == tokens[: first + 1]
        assert _sample(tiny_base, greedy)[0][0] == tokens
    finally:
        tiny_base.eos_ids = frozenset({EOS})


def test_stop_strings(tiny_base: BaseModel) -> None:
    """A completion ends with the token that completes one of the strings, also across tokens."""
    letters = replace(REQUEST, temperature=0.0, max_tokens=200)
    ((tokens, _, _),) = _sample(tiny_base, letters)
    text = tiny_base.tokenizer.decode(tokens)
    wanted = next(text[i : i + 2] for i in range(3, 100) if text[i : i + 2].isascii())
    ((stopped, _, reason),) = _sample(tiny_base, replace(letters, stop=("not there", wanted)))
    assert reason == "STOP_REASON_STOP"
    assert stopped == tokens[: len(stopped)]
    assert wanted in tiny_base.tokenizer.decode(stopped)
    assert wanted not in tiny_base.tokenizer.decode(stopped[:-1])


def test_max_tokens_absent_fills_the_context(tiny_base: BaseModel) -> None:
    """Without max_tokens a completion goes on to the context limit of 512."""
    prompt = [index % 256 for index in range(500)]
    ((tokens, _, reason),) = _sample(tiny_base, replace(REQUEST, prompt=prompt, max_tokens=None))
    assert (len(tokens), reason) == (12, "STOP_REASON_LENGTH")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "^prompt: must hold at least one token"),
        ({"prompt": (1, 320)}, r"^prompt\[1\]: token id 320 is outside the vocabulary \(0 to 319\)"),
        (
            {"prompt": (1,) * 505},
            r"prompt length \(505\) \+ max_tokens \(12\) exceeds the context window \(512 tokens\)",
        ),
        ({"prompt": (1,) * 512, "max_tokens": None}, r"prompt length \(512\) \+ max_tokens \(1\) exceeds"),
        ({"num_samples": 0}, "^num_samples: must be at least 1"),
        ({"max_tokens": 0}, r"^sampling_params\.max_tokens: must be at least 1"),
        ({"temperature": -1.0}, r"^sampling_params\.temperature: must be finite"),
        ({"temperature": float("nan")}, r"^sampling_params\.temperature: must be finite"),
        ({"top_p": 0.0}, r"^sampling_params\.top_p: must be above 0"),
        ({"top_p": 1.5}, r"^sampling_params\.top_p: must be above 0"),
        ({"top_k": 0}, r"^sampling_params\.top_k: must be -1 or at least 1"),
        ({"stop": ("",)}, r"^sampling_params\.stop: a stop string must not be empty"),
        ({"stop": ("a", 1)}, r"^sampling_params\.stop: must be a string"),
        ({"stop": (319, 320)}, r"^sampling_params\.stop\[1\]: token id 320 is outside the vocabulary \(0 to 319\)"),
        ({"stop": (-1,)}, r"^sampling_params\.stop\[0\]: token id -1 is outside"),
        ({"stop": ("a",) * 257}, r"^sampling_params\.stop: at most 256 strings, got 257"),
        ({"topk_prompt_logprobs": 257}, "^topk_prompt_logprobs: must be 0 to 256, got 257"),
        ({"topk_sample_logprobs": -1}, "^topk_sample_logprobs: must be 0 to 256, got -1"),
        ({"prompt_logprobs_last_n": 2}, "^prompt_logprobs_last_n: needs prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "^prompt_logprobs_last_n: must be 1 to 3"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "^prompt_logprobs_last_n: must be 1 to 3"),
    ],
)
def test_refusals(tiny_base: BaseModel, changes: dict[str, object], message: str) -> None:
    """Bad sampling parameters are refused by name, with the numbers."""
    with pytest.raises(ContentError, match=message):
        Sampler(tiny_base).add(0, replace(REQUEST, **changes), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, StopRule(frozenset({2}), ())),
        ("a", StopRule(frozenset({2}), ("a",))),
        (["a", "b"], StopRule(frozenset({2}), ("a", "b"))),
        ([7, 8], StopRule(frozenset({7, 8}), ())),
        ([], StopRule(frozenset(), ())),
    ],
)
def test_stop_rule(stop: str | Sequence[str] | Sequence[int] | None, expected: StopRule) -> None:
    """EOS counts unless token ids, or none at all, were asked for."""
    assert stop_rule(stop, frozenset({2}), 9) == expected


def test_choices_follow_the_distribution() -> None:
    """Frequencies over 4000 counter-based numbers are those of softmax(logits / temperature), cut by top_k or top_p."""
    logits = np.log(np.array([0.5, 0.1, 0.3, 0.1]))
    numbers = [uniform(1, 0, position) for position in range(4000)]

    def frequencies(**changes: object) -> list[float]:
        request = replace(REQUEST, **changes)  # type: ignore[arg-type]
        rule = (request.temperature, request.top_k, request.top_p)
        counts = Counter(choose(logits, *rule, number) for number in numbers)
        return [counts[token] / 4000 for token in range(4)]

    assert frequencies() == pytest.approx([0.5, 0.1, 0.3, 0.1], abs=0.03)
    squares = np.array([0.25, 0.01, 0.09, 0.01])
    assert frequencies(temperature=0.5) == pytest.approx(list(squares / squares.sum()), abs=0.03)
    assert frequencies(top_k=2) == pytest.approx([0.625, 0, 0.375, 0], abs=0.03)
    assert frequencies(top_p=0.75) == pytest.approx([0.625, 0, 0.375, 0], abs=0.03)
    assert frequencies(top_p=0.4) == [1, 0, 0, 0]
    assert frequencies(top_k=1) == [1, 0, 0, 0]
    assert choose(logits, 1.0, -1, 1.0, 1 - 2**-53) == 3


def test_what_has_no_weight_is_never_chosen() -> None:
    """Not at either end of the numbers, and not for rounding's sake."""
    logits = np.array([-1e4, 0.0, -1e4, 1.0, -1e4])
    assert [choose(logits, 1.0, -1, 1.0, number) for number in (0.0, 1 - 2**-53)] == [1, 3]
    assert choose(np.full(3, 0.1), 1.0, -1, 1.0, 1.0) == 2


def test_numbers_depend_on_seed_sample_and_position() -> None:
    """Each of the three changes the number, and nothing else does."""
    numbers = [uniform(*arguments) for arguments in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (2**64 - 1, 0, 0)]]
    assert len(set(numbers)) == 5
    assert uniform(1, 0, 0) == numbers[0]
    assert all(0 <= number < 1 for number in numbers)
