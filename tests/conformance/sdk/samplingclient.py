"""Probes of SamplingClient."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import tinker
from tinker import types
from tinker.lib.api_future_impl import QueueState

from tests.conformance.sdk.probing import probe
from tests.conformance.sdk.serviceclient import check_telemetry
from tests.conformance.sdk.world import TEXTS, World, check, close, done, prompt

GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])


def sampled(world: World, params: types.SamplingParams = GREEDY, count: int = 1, **asked: Any) -> Any:
    """The answer to one request."""
    return done(world.sampler.sample(prompt(), count, params, **asked))


def scored(world: World, tokens: list[int]) -> list[float]:
    """What another request says of each of these tokens after the prompt."""
    text = types.ModelInput.from_ints([*TEXTS[0], *tokens])
    return list(done(world.sampler.compute_logprobs(text))[len(TEXTS[0]) :])


@probe("SamplingClient.sample", "`compute_logprobs` gives its tokens the same log-probabilities")
def sample(world: World) -> None:
    params = types.SamplingParams(max_tokens=6, seed=11, temperature=1.0, stop=[])
    for sequence in sampled(world, params, 2).sequences:
        expected = scored(world, sequence.tokens)
        same = all(close(one, other) for one, other in zip(sequence.logprobs, expected, strict=True))
        check(same and len(sequence.tokens) == 6, f"{sequence.logprobs} instead of {expected}")


@probe("SamplingClient.compute_logprobs", "`forward` gives the same of the same weights")
def compute_logprobs(world: World) -> None:
    world.check_samples_from(world.sampler, world.training)


@probe("SamplingClient.create", "`compute_logprobs` equals `forward` under the weights saved")
def create(world: World) -> None:
    sampler = done(tinker.SamplingClient.create(world.service.holder, model_path=world.weights))
    world.check_samples_from(sampler, world.training)


@probe("SamplingClient.get_sampler_handle", "`from_sampler_handle` samples from the same weights")
def get_sampler_handle(world: World) -> None:
    world.check_samples_from(_copy(world), world.training)


@probe("SamplingClient.from_sampler_handle", "it samples what the client samples that the handle is of")
def from_sampler_handle(world: World) -> None:
    found = done(_copy(world).sample(prompt(), 1, GREEDY)).sequences[0].tokens
    check(found == sampled(world).sequences[0].tokens, f"{found}")


def _copy(world: World) -> Any:
    return tinker.SamplingClient.from_sampler_handle(world.sampler.get_sampler_handle())


@probe("SamplingClient.get_base_model", "the base model that `get_info` names")
def get_base_model(world: World) -> None:
    check(world.sampler.get_base_model() == world.training.get_info().model_data.model_name, "another")


@probe("SamplingClient.get_tokenizer", "it decodes a text of the base model, found by the name that the server gives")
def get_tokenizer(world: World) -> None:
    check(world.sampler.get_tokenizer().decode(TEXTS[0][:2]) == "w5 w17", "another tokenizer")


@probe("SamplingClient.get_telemetry", "what is logged is taken by the server, which keeps none of it")
def get_telemetry(world: World) -> None:
    check_telemetry(world.sampler)


@probe("SamplingClient.on_queue_state_change", "the SDK's own: it logs the reason that a server gave")
def on_queue_state_change(world: World) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(tinker.SamplingClient.on_queue_state_change.__module__)
    logger.addHandler(handler)
    try:
        done(world.service.create_sampling_client(model_path=world.weights)).on_queue_state_change(
            QueueState.PAUSED_CAPACITY, "the session starts"
        )
    finally:
        logger.removeHandler(handler)
    check(any("the session starts" in line for line in lines), f"{lines}")


@probe("SamplingClient.*_async", "`sample_async`: as the method of the same name")
def twins(world: World) -> None:
    found = asyncio.run(world.sampler.sample_async(prompt(), 1, GREEDY)).sequences[0].tokens
    check(found == sampled(world).sequences[0].tokens, f"{found}")
