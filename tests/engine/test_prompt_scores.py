"""What a client asks of its prompt besides the prompt's own tokens: named tokens, and drawn alternatives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.choosing import draw, uniform, uniforms
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.requests import SampleRequest
from everloop_trainer.engine.sampling import Sampled, Sampler
from everloop_trainer.engine.targets import PromptTargets
from everloop_trainer.tinker_proto import tinker_public
from tests.engine.reference import plain_model

REQUEST = SampleRequest((10, 20, 30, 40), 1, 1, 1.0, 1.0, -1, 3, ())
VOCABULARY = 320


def _response(base: BaseModel, *requests: SampleRequest) -> Any:
    """The SampleResponse to the first of the requests, which are under way together."""
    sampler = Sampler(base)
    answers: dict[int, Sampled | ContentError] = {}
    for key, request in enumerate(requests):
        sampler.add(key, request, None)
    while sampler.busy:
        answers.update(sampler.step())
    answer = answers[0]
    assert isinstance(answer, Sampled), answer
    return tinker_public.SampleResponse.FromString(answer.body)


def _long(length: int) -> list[int]:
    return [(index * 11) % 256 for index in range(length)]


def _scores(model: Path, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities (length - 1, vocabulary) of what may follow each token but the last: a plain forward pass."""
    with torch.no_grad():
        return torch.log_softmax(plain_model(model)(input_ids=torch.tensor([prompt])).logits[0, :-1], -1)


def _targets(ids: NDArray[np.int64], sparse: bool) -> PromptTargets:
    """A dense matrix, or all its cells but every other -1 in compressed sparse rows."""
    shape: tuple[int, int] = (len(ids), ids.shape[1])
    if not sparse:
        return PromptTargets(*shape, ids.reshape(-1))
    listed = [(row, column) for row, column in np.ndindex(*ids.shape) if ids[row, column] >= 0 or column % 2]
    counts = Counter(row for row, _ in listed)
    return PromptTargets(
        *shape,
        np.array([ids[cell] for cell in listed]),
        np.cumsum([0, *(counts[row] for row in range(len(ids)))]),
        np.array([column for _, column in listed]),
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("first", [0, 120, 297])
def test_named_tokens_have_the_scores_of_a_plain_forward_pass(
    tiny_base: BaseModel, tiny_model: Path, first: int, sparse: bool
) -> None:
    """Over several slices of the head, in the layout that was asked for; 0 where nothing was named."""
    prompt = _long(300)
    generator = np.random.default_rng(first)
    ids = generator.integers(-1, VOCABULARY, (299, 4))
    ids[generator.random((299, 4)) < 0.5] = -1
    ids[:first] = -1
    ids[first, 2] = 17
    request = replace(REQUEST, prompt=prompt, target_prompt_logprobs=_targets(ids, sparse))
    told = _response(tiny_base, request).target_prompt_logprobs
    assert (tuple(told.shape), told.dtype) == ((299, 4), tinker_public.DTYPE_FLOAT32)
    assert told.HasField("sparse_csr") == sparse
    found = np.zeros((299, 4), np.float32)
    if sparse:
        crow = np.frombuffer(told.sparse_csr.crow_indices, np.int64)
        columns = np.frombuffer(told.sparse_csr.col_indices, np.int64)
        assert len(columns) < ids.size
        rows = np.repeat(np.arange(299), np.diff(crow))
        found[rows, columns] = np.frombuffer(told.sparse_csr.values, np.float32)
    else:
        found[:] = np.frombuffer(told.dense, np.float32).reshape(299, 4)
    expected = _scores(tiny_model, prompt).gather(1, torch.from_numpy(np.maximum(ids, 0))).numpy()
    np.testing.assert_allclose(found, np.where(ids == -1, 0, expected), rtol=1e-4, atol=1e-4)
    assert (found[ids == -1] == 0).all()


def test_the_prompts_own_tokens_named_have_their_own_scores(tiny_base: BaseModel) -> None:
    """The same bits both ways, and how many of the last ones are scored changes nothing in the named ones."""
    prompt = _long(300)
    own = PromptTargets(299, 1, np.array(prompt[1:]))
    request = replace(REQUEST, prompt=prompt, prompt_logprobs=True, target_prompt_logprobs=own)
    whole = _response(tiny_base, request)
    named = np.frombuffer(whole.target_prompt_logprobs.dense, np.float32)
    np.testing.assert_array_equal(named, np.frombuffer(whole.prompt_logprobs, np.float32)[1:])
    for last in (1, 44, 299):
        some = _response(tiny_base, replace(request, prompt_logprobs_last_n=last, topk_prompt_logprobs=1))
        np.testing.assert_array_equal(np.frombuffer(some.target_prompt_logprobs.dense, np.float32), named)
        scored = np.frombuffer(some.prompt_logprobs, np.float32)
        np.testing.assert_array_equal(scored[-last:], named[-last:])
        assert np.isnan(scored[:-last]).all()
        assert (some.topk_prompt_logprobs.length, len(scored)) == (300, 300)
        likeliest = np.frombuffer(some.topk_prompt_logprobs.logprobs, np.float32)
        np.testing.assert_array_equal(likeliest == -99999.0, np.isnan(scored))


def _drawn(response: Any) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    drawn = response.prompt_alt_tokens
    shape = tuple(drawn.tokens.shape)
    assert tuple(drawn.logprobs.shape) == shape
    assert (drawn.tokens.dtype, drawn.logprobs.dtype) == (tinker_public.DTYPE_INT64, tinker_public.DTYPE_FLOAT32)
    tokens = np.frombuffer(drawn.tokens.dense, np.int64).reshape(shape)
    return tokens, np.frombuffer(drawn.logprobs.dense, np.float32).reshape(shape)


def test_alternatives_have_the_scores_of_a_plain_forward_pass(tiny_base: BaseModel, tiny_model: Path) -> None:
    """Of each position but the first, at any temperature those of temperature 1; at 0 the likeliest is drawn."""
    prompt = _long(300)
    scores = _scores(tiny_model, prompt)
    for temperature in (0.0, 5.0):
        request = replace(REQUEST, prompt=prompt, temperature=temperature, top_k=2, prompt_alt_tokens_k=6)
        tokens, logprobs = _drawn(_response(tiny_base, request))
        assert tokens.shape == (299, 6)
        expected = scores.gather(1, torch.from_numpy(tokens.copy())).numpy()
        np.testing.assert_allclose(logprobs, expected, rtol=1e-4, atol=1e-4)
        if temperature == 0:
            np.testing.assert_array_equal(tokens, scores.argmax(1).numpy()[:, None].repeat(6, 1))
        else:
            assert max(len(set(row)) for row in tokens.tolist()) > 2, "top_k is for the samples"


def test_alternatives_follow_the_temperature(tiny_base: BaseModel, tiny_model: Path) -> None:
    """Over 8 x 256 draws, what is drawn is as likely on average as softmax(logits / temperature) says."""
    scores = _scores(tiny_model, list(REQUEST.prompt)).double()
    for temperature in (4.0, 8.0):
        asked = replace(REQUEST, temperature=temperature, prompt_alt_tokens_k=256)
        draws = [_drawn(_response(tiny_base, replace(asked, seed=seed))) for seed in range(8)]
        found = np.concatenate([logprobs for _, logprobs in draws], 1)
        weights = torch.softmax(scores / temperature, -1)
        expected = (weights * scores).sum(-1)
        deviation = ((weights * scores**2).sum(-1) - expected**2).sqrt() / np.sqrt(found.shape[1])
        assert (deviation > 1e-3).all(), "a model that is sure of itself shows nothing"
        assert (np.abs(found.mean(1) - expected.numpy()) < 5 * deviation.numpy()).all()


def test_alternatives_depend_on_seed_and_position_alone(tiny_base: BaseModel) -> None:
    """Not on the company, nor on how many are drawn, and the samples are what they are without them."""
    request = replace(REQUEST, prompt=_long(40), max_tokens=6, temperature=3.0, prompt_alt_tokens_k=8)
    whole = _response(tiny_base, request)
    tokens, _ = _drawn(whole)
    even, _ = _drawn(_response(tiny_base, replace(request, temperature=1e9)))
    assert len({*map(tuple, even.tolist())}) == len(even), "each position has numbers of its own"
    others = [replace(request, seed=seed, prompt=_long(seed)) for seed in range(5, 20)]
    assert _response(tiny_base, request, *others) == whole
    fewer, _ = _drawn(_response(tiny_base, replace(request, prompt_alt_tokens_k=3)))
    np.testing.assert_array_equal(fewer, tokens[:, :3])
    assert (_drawn(_response(tiny_base, replace(request, seed=4)))[0] != tokens).any()
    assert whole.sequences == _response(tiny_base, replace(request, prompt_alt_tokens_k=0)).sequences


def test_a_prompt_of_one_token_has_no_alternatives(tiny_base: BaseModel) -> None:
    """No row, but the matrices are there: the SDK takes their absence for a server that knows none of this."""
    response = _response(tiny_base, replace(REQUEST, prompt=(7,), prompt_alt_tokens_k=2))
    assert response.HasField("prompt_alt_tokens")
    assert _drawn(response)[0].shape == (0, 2)


def test_nothing_is_told_that_was_not_asked_for(tiny_base: BaseModel) -> None:
    """The SDK makes None of what is absent."""
    response = _response(tiny_base, REQUEST)
    absent = ("topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens")
    assert not any(response.HasField(name) for name in absent)
    assert response.prompt_logprobs == b""


def _cells(*ids: int, **layout: Any) -> PromptTargets:
    values = {name: np.array(value, np.int64) for name, value in layout.items()}
    return PromptTargets(3, 2, np.array(ids, np.int64), **values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_alt_tokens_k": -1}, "^prompt_alt_tokens_k: must be 0 to 256, got -1"),
        ({"prompt_alt_tokens_k": 257}, "^prompt_alt_tokens_k: must be 0 to 256, got 257"),
        (
            {"prompt": (1, 2), "target_prompt_logprobs": _cells(*[1] * 6)},
            r"^target_prompt_logprobs\.shape: must be \[1, K\].* got \[3, 2\]",
        ),
        ({"target_prompt_logprobs": PromptTargets(3, 0, np.empty(0, np.int64))}, r"\.shape: .* got \[3, 0\]"),
        ({"target_prompt_logprobs": PromptTargets(3, 1025, np.ones(3075, np.int64))}, r"\.shape: .* got \[3, 1025\]"),
        ({"target_prompt_logprobs": _cells(1, 2)}, r"^target_prompt_logprobs\.data: 2 values for shape \[3, 2\]"),
        (
            {"target_prompt_logprobs": _cells(*[1] * 5, 320)},
            r"^target_prompt_logprobs\.data\[5\]: must be a token id \(0 to 319\) or -1, got 320",
        ),
        ({"target_prompt_logprobs": _cells(-2, *[1] * 5)}, r"data\[0\]: .* got -2"),
        ({"target_prompt_logprobs": _cells(*[-1] * 6)}, r"^target_prompt_logprobs\.data: names no token"),
        ({"target_prompt_logprobs": _cells(crow=[0, 0, 0, 0], columns=[])}, r"data: names no token"),
        ({"target_prompt_logprobs": _cells(1, crow=[0, 1], columns=[0])}, "sparse_crow_indices: don't divide 1 values"),
        ({"target_prompt_logprobs": _cells(1, crow=[], columns=[0])}, "sparse_crow_indices: don't divide 1 values"),
        ({"target_prompt_logprobs": _cells(1, crow=[0, 1, 1, 1], columns=[2])}, "sparse_col_indices: must be 0 to 1"),
        ({"target_prompt_logprobs": _cells(1, crow=[0, 1, 1, 1], columns=[])}, "sparse_col_indices: 0 indices for 1"),
        (
            {"target_prompt_logprobs": _cells(1, 2, crow=[0, 2, 2, 2], columns=[1, 1])},
            "sparse_col_indices: a row names a column twice",
        ),
    ],
)
def test_refusals(tiny_base: BaseModel, changes: dict[str, Any], message: str) -> None:
    """What can't be asked is refused by name, with the numbers."""
    with pytest.raises(ContentError, match=message):
        Sampler(tiny_base).add(0, replace(REQUEST, **changes), None)


def test_draws_follow_the_distribution() -> None:
    """Frequencies over 4000 numbers are those of softmax(logits / temperature)."""
    logits = np.log(np.array([0.5, 0.1, 0.3, 0.1]))
    for temperature, expected in ((1.0, [0.5, 0.1, 0.3, 0.1]), (0.5, [25 / 36, 1 / 36, 9 / 36, 1 / 36])):
        counts = np.bincount(draw(logits, temperature, uniforms(1, 0, 4000)), minlength=4)
        assert counts / 4000 == pytest.approx(expected, abs=0.03)
    assert (draw(logits, 0, uniforms(1, 0, 5)) == 0).all()


def test_numbers_of_draws_are_none_of_the_samples() -> None:
    """They depend on seed and position, and no sample of the request has one of them."""
    numbers = uniforms(1, 2, 100)
    assert (numbers[:7] == uniforms(1, 2, 7)).all()
    assert len({*numbers, *uniforms(1, 3, 100), *uniforms(2, 2, 100)}) == 300
    assert not {*numbers} & {uniform(1, index, position) for index in range(5) for position in range(100)}
