"""Probes of arguments that change what a call does."""

from __future__ import annotations

import math
from typing import Any

from tinker import types
from tinker.lib.retry_handler import RetryConfig

from tests.conformance.sdk.probing import probe
from tests.conformance.sdk.reasons import STABLE_REINFORCE
from tests.conformance.sdk.restclient import TTL_SECONDS, check_expires
from tests.conformance.sdk.samplingclient import GREEDY, sampled
from tests.conformance.sdk.world import TEXTS, World, check, close, done, loss, prompt, step

SAMPLE = "SamplingClient.sample"
SAVE = "TrainingClient.save_state"
FOR_SAMPLER = "TrainingClient.save_weights_for_sampler"
AND_SAMPLER = "TrainingClient.save_weights_and_get_sampling_client"
ROWS = len(TEXTS[0]) - 1
METADATA = {"author": "conformance"}


def _scores(world: World) -> list[float]:
    """Of the prompt's tokens but the first."""
    return list(done(world.sampler.compute_logprobs(prompt()))[1:])


def _same(found: Any, expected: Any) -> None:
    pairs = list(zip(found, expected, strict=True))
    check(all(close(one, other) for one, other in pairs), f"{found} instead of {expected}")


@probe(f"{SAMPLE}(include_prompt_logprobs)", "`compute_logprobs` gives the same")
def include_prompt_logprobs(world: World) -> None:
    answer = sampled(world, include_prompt_logprobs=True)
    check(answer.prompt_logprobs[0] is None, "the first token has one")
    _same(answer.prompt_logprobs[1:], _scores(world))


@probe(f"{SAMPLE}(topk_prompt_logprobs)", "so many a position; the prompt's own token is none of them or scored alike")
def topk_prompt_logprobs(world: World) -> None:
    rows = sampled(world, topk_prompt_logprobs=3).topk_prompt_logprobs
    for row, token, expected in zip(rows[1:], TEXTS[0][1:], _scores(world), strict=True):
        check(len(row) == 3, f"{row}")
        found = dict(row).get(token)
        if found is None:
            check(min(logprob for _, logprob in row) >= expected, f"{token} is likelier than {row}")
        else:
            check(close(found, expected), f"{found} instead of {expected}")


@probe(f"{SAMPLE}(topk_sample_logprobs)", "the likeliest token is the one that greedy sampling took")
def topk_sample_logprobs(world: World) -> None:
    sequence = sampled(world, topk_sample_logprobs=2).sequences[0]
    for row, token, expected in zip(sequence.topk_logprobs, sequence.tokens, sequence.logprobs, strict=True):
        check(len(row) == 2 and row[0][0] == token and close(row[0][1], expected), f"{row}")


@probe(
    f"{SAMPLE}(target_prompt_logprobs)",
    "`compute_logprobs` gives the prompt's own tokens the same",
)
def target_prompt_logprobs(world: World) -> None:
    target = types.TensorData(data=TEXTS[0][1:], dtype="int64", shape=[ROWS, 1])
    _same(sampled(world, target_prompt_logprobs=target).target_prompt_logprobs.data, _scores(world))


@probe(
    f"{SAMPLE}(prompt_alt_tokens_k)",
    "`topk_prompt_logprobs` of the whole vocabulary gives each drawn token the same",
)
def prompt_alt_tokens_k(world: World) -> None:
    drawn = sampled(world, prompt_alt_tokens_k=2).prompt_alt_tokens
    likeliest = sampled(world, topk_prompt_logprobs=20).topk_prompt_logprobs[1:]
    tokens, logprobs = list(drawn.tokens.data), list(drawn.logprobs.data)
    check(len(tokens) == 2 * ROWS, f"{tokens}")
    for position, row in enumerate(likeliest):
        for token, found in list(zip(tokens, logprobs, strict=True))[2 * position : 2 * position + 2]:
            expected = dict(row).get(token)
            least = min(logprob for _, logprob in row)
            check(close(found, expected) if expected is not None else found <= least, f"{token}: {found}")


@probe(f"{SAMPLE}(prompt_logprobs_last_n)", "`compute_logprobs` gives the last ones the same; the others are None")
def prompt_logprobs_last_n(world: World) -> None:
    found = sampled(world, include_prompt_logprobs=True, prompt_logprobs_last_n=2).prompt_logprobs
    check(found[:-2] == [None] * (ROWS - 1), f"{found}")
    _same(found[-2:], _scores(world)[-2:])


@probe("SamplingClient.compute_logprobs(prompt_logprobs_last_n)", "the last ones as without it; the others are None")
def compute_logprobs_last_n(world: World) -> None:
    found = done(world.sampler.compute_logprobs(prompt(), prompt_logprobs_last_n=2))
    check(found[:-2] == [None] * (ROWS - 1), f"{found}")
    _same(found[-2:], _scores(world)[-2:])


@probe(f"{SAVE}(ttl_seconds)", "`list_checkpoints` has when it expires")
def save_state_ttl(world: World) -> None:
    check_expires(world, done(world.training.save_state("passing", ttl_seconds=TTL_SECONDS)).path)


@probe(f"{SAVE}(overwrite)", "a second save of the name replaces the first: a model made from it has the later loss")
def save_state_overwrite(world: World) -> None:
    client = world.fresh()
    done(client.save_state("replaced"))
    step(client)
    path = done(client.save_state("replaced", overwrite=True)).path
    check(close(loss(done(world.service.create_training_client_from_state(path))), loss(client)), "the first one")


@probe(f"{SAVE}(user_metadata)", "`list_checkpoints` has it")
def save_state_metadata(world: World) -> None:
    path = done(world.training.save_state("described", user_metadata=METADATA)).path
    check(world.checkpoint(path).user_metadata == METADATA, f"{world.checkpoint(path)}")


@probe(f"{FOR_SAMPLER}(ttl_seconds)", "`list_checkpoints` has when they expire")
def for_sampler_ttl(world: World) -> None:
    check_expires(world, done(world.training.save_weights_for_sampler("passing", ttl_seconds=TTL_SECONDS)).path)


@probe(f"{FOR_SAMPLER}(user_metadata)", "`list_checkpoints` has it")
def for_sampler_metadata(world: World) -> None:
    path = done(world.training.save_weights_for_sampler("described", user_metadata=METADATA)).path
    check(world.checkpoint(path).user_metadata == METADATA, f"{world.checkpoint(path)}")


@probe(f"{AND_SAMPLER}(name)", "the SDK's own: the sampler is that of a call without it")
def named_sampler(world: World) -> None:
    world.check_samples_from(done(world.training.save_weights_and_get_sampling_client("named")), world.training)


@probe(f"{AND_SAMPLER}(retry_config)", "the SDK's own: the sampler samples")
def retrying_sampler(world: World) -> None:
    sampler = done(world.training.save_weights_and_get_sampling_client(retry_config=RetryConfig(max_connections=1)))
    world.check_samples_from(sampler, world.training)


@probe(
    f"{AND_SAMPLER}(record_stability_info)",
    "its samples are those of a sampler without it",
    STABLE_REINFORCE,
)
def recording_sampler(world: World) -> None:
    sampler = done(world.training.save_weights_and_get_sampling_client(record_stability_info=True))
    found = done(sampler.sample(prompt(), 1, GREEDY)).sequences[0]
    check(found.tokens == sampled(world).sequences[0].tokens, f"{found}")
    check(all(math.isfinite(each) for each in found.logprobs), f"{found}")


@probe(f"{AND_SAMPLER}(kind)", "an `inflight` sampler follows the next `inflight` save, by what `forward` gives")
def inflight_sampler(world: World) -> None:
    client = world.fresh()
    sampler = done(client.save_weights_and_get_sampling_client(kind="inflight"))
    step(client)
    done(client.save_weights_and_get_sampling_client(kind="inflight"))
    world.check_samples_from(sampler, client)
