"""Sampling after images: what transformers generates, with the log-probabilities that training computes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everloop_trainer.engine import training
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.datums import parse_request
from everloop_trainer.engine.errors import ContentError
from everloop_trainer.engine.images import Image
from everloop_trainer.engine.inputs import read_chunks
from everloop_trainer.engine.lora import Adapter, LoraSpec
from everloop_trainer.engine.requests import SampleRequest
from everloop_trainer.engine.sampling import Sampled, Sampler
from everloop_trainer.engine.vision import Sight
from everloop_trainer.engine.worker import Worker
from everloop_trainer.tinker_proto import tinker_public
from tests.engine.client import SAMPLE, put, request
from tests.engine.reference import randomise
from tests.engine.seeing import Part, chunks, picture, plain_inputs, plain_seeing_model
from tests.server.tinyvision import END, IMAGE, START, VIDEO

ONE, TWO = picture(64, 48, 1), picture(40, 90, 2, "jpeg")
PROMPT: tuple[Part, ...] = ([10, START], ONE, [END, 20, 30, START], TWO, [END, 40])


def _request(base: BaseModel, parts: Sequence[Part], **changes: Any) -> SampleRequest:
    read = read_chunks("prompt", chunks(*parts).model_input, base.limits)
    plain = SampleRequest(read.tokens.tolist(), 1, 12, 1.0, 1.0, -1, 3, (), images=read.images)
    return replace(plain, **changes)


def _responses(base: BaseModel, *requests: SampleRequest, adapter: Adapter | None = None) -> list[Any]:
    sampler = Sampler(base)
    answers: dict[int, Sampled | ContentError] = {}
    for key, each in enumerate(requests):
        sampler.add(key, each, adapter)
    while sampler.busy:
        answers.update(sampler.step())
    return [_response(answers[key]) for key in range(len(requests))]


def _response(answer: Sampled | ContentError) -> Any:
    assert isinstance(answer, Sampled), answer
    return tinker_public.SampleResponse.FromString(answer.body)


def _tokens(sequence: Any) -> list[int]:
    return [int(token) for token in np.frombuffer(sequence.tokens, np.int32)]


@pytest.fixture(scope="module")
def adapter(seeing_base: BaseModel) -> Adapter:
    """With values like those of a trained one."""
    found = Adapter(LoraSpec(4, 5, train_mlp=True, train_attn=True, train_unembed=True), seeing_base.targets)
    found.initialise()
    randomise(found)
    return found


@pytest.mark.parametrize("parts", [PROMPT, ([1, 2, 3],)], ids=["images", "text"])
def test_greedy_equals_generate(seeing_base: BaseModel, seeing_model: Path, parts: tuple[Part, ...]) -> None:
    """Temperature 0 gives the tokens that transformers generates, behind images and where there are none."""
    ((sequence,),) = (each.sequences for each in _responses(seeing_base, _request(seeing_base, parts, temperature=0.0)))
    model = plain_seeing_model(seeing_model)
    model.generation_config.eos_token_id = None
    inputs = plain_inputs(seeing_model, *parts)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert _tokens(sequence) == expected[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("parts", [PROMPT, ([1, START], TWO)], ids=["images", "an image at the end"])
def test_logprobs_are_those_of_forward(seeing_base: BaseModel, adapter: Adapter, parts: tuple[Part, ...]) -> None:
    """Whatever temperature, top_k and top_p chose, sampling and training agree on each token, for each of n samples."""
    asked = _request(seeing_base, parts, temperature=3.0, top_k=50, top_p=0.9, num_samples=3)
    (response,) = _responses(seeing_base, asked, adapter=adapter)
    for sequence in response.sequences:
        tokens = _tokens(sequence)
        message = chunks(*parts, tokens[:-1])
        targets = [0] * (len(asked.prompt) - 1) + tokens
        put(message, "target_tokens", np.asarray(targets))
        put(message, "weights", np.ones(len(targets), np.float32))
        seeing_base.use(adapter)
        (logprobs,) = training.forward(seeing_base, parse_request(request(message), seeing_base.limits), 4096).logprobs
        found = np.frombuffer(sequence.logprobs, np.float32)
        np.testing.assert_allclose(found, logprobs[-len(tokens) :], rtol=1e-5, atol=1e-4)


def test_a_sample_does_not_depend_on_its_company(seeing_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits alone, among others of its prompt, and beside other prompts; a prompt's images are seen once."""
    asked = _request(seeing_base, PROMPT, temperature=2.0)
    (alone,) = _responses(seeing_base, asked)
    assert seeing_base._vision is not None
    seen: list[int] = []
    see = seeing_base._vision.see

    def counted(tokens: torch.Tensor, images: Sequence[Sequence[Image]]) -> Sight:
        seen.append(len(images[0]))
        return see(tokens, images)

    monkeypatch.setattr(seeing_base._vision, "see", counted)
    others = [_request(seeing_base, parts, num_samples=3) for parts in (([1, START], TWO), ([1, 2, 3],))]
    together = _responses(seeing_base, others[0], replace(asked, num_samples=9), others[1])
    assert together[1].sequences[0] == alone.sequences[0]
    assert len({tuple(_tokens(each)) for each in together[1].sequences}) == 9
    assert seen == [1, 2]


def test_placeholders_are_never_drawn(seeing_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where they are by far the likeliest; what is said of the others is what the model says of them."""
    logits = seeing_base.logits
    reserved = torch.tensor([IMAGE, VIDEO])

    def biased(hidden: torch.Tensor) -> torch.Tensor:
        return logits(hidden).index_add(1, reserved, torch.full((len(hidden), 2), 60.0))

    monkeypatch.setattr(seeing_base, "logits", biased)
    for temperature in (0.0, 1.0, 5.0):
        asked = _request(seeing_base, PROMPT, temperature=temperature, num_samples=8, prompt_alt_tokens_k=4)
        (response,) = _responses(seeing_base, asked)
        for sequence in response.sequences:
            assert not {IMAGE, VIDEO} & set(_tokens(sequence))
            assert np.frombuffer(sequence.logprobs, np.float32).max() < -10
        drawn = np.frombuffer(response.prompt_alt_tokens.tokens.dense, np.int64)
        assert drawn.size
        assert not {IMAGE, VIDEO} & set(drawn.tolist())


def test_a_prompt_is_scored_but_for_its_images(seeing_base: BaseModel, seeing_model: Path) -> None:
    """Tokens that stand for images have no log-probability and no likeliest ones; all others have the model's."""
    asked = _request(seeing_base, PROMPT, prompt_logprobs=True, topk_prompt_logprobs=2)
    (response,) = _responses(seeing_base, asked)
    inputs = plain_inputs(seeing_model, *PROMPT)
    ids = inputs["input_ids"][0]
    with torch.no_grad():
        scores = torch.log_softmax(plain_seeing_model(seeing_model)(**inputs).logits[0, :-1], -1)
    expected = scores.gather(1, ids[1:, None])[:, 0].numpy()
    found = np.frombuffer(response.prompt_logprobs, np.float32)
    text = (ids != IMAGE).numpy()
    assert np.isnan(found[0])
    assert np.isnan(found[~text]).all()
    np.testing.assert_allclose(found[1:][text[1:]], expected[text[1:]], rtol=1e-5, atol=1e-4)
    likeliest = np.frombuffer(response.topk_prompt_logprobs.logprobs, np.float32).reshape(-1, 2)
    assert (likeliest[~text] == -99999.0).all()
    top = scores.topk(2).values.numpy()
    np.testing.assert_allclose(likeliest[1:][text[1:]], top[text[1:]], rtol=1e-5, atol=1e-4)


def test_a_placeholder_in_a_prompt_of_text_is_refused(seeing_base: BaseModel) -> None:
    """It would stand for an image that is not there."""
    with pytest.raises(ContentError, match=rf"^prompt\[1\]: token id {IMAGE} stands for a part of an image"):
        Sampler(seeing_base).add(0, SampleRequest([5, IMAGE], 1, 1, 1.0, 1.0, -1, 3, ()), None)


def test_a_damaged_image_ends_its_request_alone(seeing_base: BaseModel) -> None:
    """Named by its place in the prompt; the one beside it is sampled as it is alone."""
    good = _request(seeing_base, ([1, 2, 3],))
    (alone,) = _responses(seeing_base, good)
    sampler = Sampler(seeing_base)
    sampler.add(0, _request(seeing_base, ([1], picture(60, 60, 4)[:-40], [2])), None)
    sampler.add(1, good, None)
    answers: dict[int, Sampled | ContentError] = {}
    while sampler.busy:
        answers.update(sampler.step())
    assert str(answers[0]).startswith("prompt.chunks[1].data: not a whole png image: ")
    assert _response(answers[1]) == alone


def test_a_prompt_with_images_comes_in_the_body_of_its_message(seeing_base: BaseModel, seeing_model: Path) -> None:
    """Beside it everything is where it is for a prompt of text."""
    config = SpareConfig(Path("unused"), seeing_model, "test/seeing", max_sequence_length=128)
    here, there = socket.socketpair()
    with here, there:
        worker = Worker(here, seeing_base, config)
        worker._sample({"id": 7, **SAMPLE, "prompt": []}, chunks(*PROMPT).SerializeToString())
    ((job,),) = worker._sampler._waiting.values()
    assert job.key == 7
    assert job.request == _request(seeing_base, PROMPT, max_tokens=8, stop=None)
