"""Probes of losses, and of the fields of parameters."""

from __future__ import annotations

import functools
from typing import Any

import tinker
from tinker import types

from tests.conformance.sdk import reasons
from tests.conformance.sdk.probing import PROBES, Probe, probe
from tests.conformance.sdk.samplingclient import GREEDY, sampled
from tests.conformance.sdk.world import ADAM, TEXTS, World, check, close, datum, done, loss, prompt, step, texts

CHANGED = {
    "learning_rate": 3e-3,
    "beta1": 0.5,
    "beta2": 0.5,
    "eps": 1e-2,
    "weight_decay": 0.5,
    "grad_clip_norm": 1e-3,
}
"""Of Adam's parameters, to other values than those of ADAM. Two steps show each of them."""
RATIO_LOSSES: dict[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": {},
    "cispo": {},
    "gspo": {},
    "dro": {"beta": 0.05},
}
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c6378a6110500036001694"
    "00dc8990000000049454e44ae426082"
)
BLACK = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f"
    "61738550000000049454e44ae426082"
)
"""Two images of one pixel."""


@probe('loss_fn="cross_entropy"', "after `optim_step` the loss is lower")
def cross_entropy(world: World) -> None:
    client = world.fresh()
    before = loss(client)
    step(client)
    check(loss(client) < before, "it is no lower")


@probe('loss_fn="custom"', "by the id of a loss that doubles `cross_entropy`, the loss is twice as high")
def custom(world: World) -> None:
    def doubled(logprobs: Any, weights: Any) -> Any:
        return -2 * (logprobs * weights).sum(), {}

    handle = done(world.service.create_custom_loss(doubled, {"logprobs": 1, "weights": 1}))
    client = world.fresh()
    found = done(client.forward_backward(texts(), "custom", {"loss_id": handle.loss_id})).metrics["loss:sum"]
    check(close(found, 2 * loss(client)), f"{found}")


def ratio_loss(world: World, name: str, config: dict[str, float]) -> None:
    """A step on a text with positive advantages makes it likelier, by `forward`."""
    client = world.fresh()
    text = TEXTS[0]
    plain = [datum(text, weights=[1.0] * (len(text) - 1))]
    now = done(client.forward(plain, "cross_entropy"))
    inputs = {"logprobs": list(now.loss_fn_outputs[0]["logprobs"].data), "advantages": [1.0] * (len(text) - 1)}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = [1.0] * (len(text) - 1)
    done(client.forward_backward([datum(text, **inputs)], name, config))
    done(client.optim_step(ADAM))
    after = done(client.forward(plain, "cross_entropy"))
    check(after.metrics["loss:sum"] < now.metrics["loss:sum"], "the text is no likelier")


for _name, _config in RATIO_LOSSES.items():
    _run = functools.partial(ratio_loss, name=_name, config=_config)
    PROBES[f'loss_fn="{_name}"'] = Probe(_run, "a step makes what has an advantage likelier, by `forward`", None)
PROBES['loss_fn="stable_reinforce"'] = Probe(
    functools.partial(ratio_loss, name="stable_reinforce", config={}),
    "a step makes what has an advantage likelier, by `forward`",
    reasons.STABLE_REINFORCE,
)


def adam(world: World, field: str, value: float) -> None:
    """Two steps with another value of one field end elsewhere."""
    client = world.fresh()
    for _ in range(2):
        step(client, ADAM.model_copy(update={field: value}))
    check(not close(loss(client), world.loss_after_two_steps), "two steps end where they end without it")


for _field, _value in CHANGED.items():
    PROBES[f"AdamParams.{_field}"] = Probe(
        functools.partial(adam, field=_field, value=_value), "two steps with another value end elsewhere", None
    )


@probe("LoraConfig.rank", "`get_training_run` has it")
def rank(world: World) -> None:
    found = done(world.rest.get_training_run(world.fresh(rank=3).model_id)).lora_rank
    check(found == 3, f"{found}")


@probe("LoraConfig.seed", "a step with the same one ends at the same loss, with another elsewhere")
def seed(world: World) -> None:
    same, other = world.fresh(), world.fresh(seed=8)
    step(same)
    step(other)
    check(close(loss(same), loss(world.training)), "the same seed ends elsewhere")
    check(not close(loss(other), loss(world.training)), "another seed ends at the same loss")


def trained_part(world: World, part: str) -> None:
    """Without it a step ends elsewhere, and a checkpoint says so."""
    client = world.fresh(**{part: False})
    step(client)
    check(not close(loss(client), loss(world.training)), "a step ends where it ends with it")
    info = done(world.rest.get_weights_info_by_tinker_path(done(client.save_state("part")).path))
    found = {each: getattr(info, each) for each in ("train_attn", "train_mlp", "train_unembed")}
    check(found == {each: each != part for each in found}, f"{found}")


for _part in ("train_attn", "train_mlp", "train_unembed"):
    PROBES[f"LoraConfig.{_part}"] = Probe(
        functools.partial(trained_part, part=_part), "`get_weights_info_by_tinker_path` has it; a step differs", None
    )


@probe("AdamOptimizerConfig", "as without it: a step ends at the same loss")
def adam_optimizer(world: World) -> None:
    client = world.fresh(optimizer=tinker.AdamOptimizerConfig())
    step(client)
    check(close(loss(client), loss(world.training)), "a step ends elsewhere")


@probe("DimuonOptimizerConfig", "a step with its parameters lowers the loss", reasons.OPTIMIZERS)
def dimuon_optimizer(world: World) -> None:
    client = world.fresh(optimizer=tinker.DimuonOptimizerConfig())
    before = loss(client)
    done(client.forward_backward(texts(), "cross_entropy"))
    done(client.optim_step(tinker.DimuonParams(learning_rate=1e-2)))
    check(loss(client) < before, "it is no lower")


def _tokens(world: World, **params: Any) -> list[int]:
    asked = {"max_tokens": 6, "stop": [], "seed": 5, **params}
    return list(sampled(world, types.SamplingParams(**asked)).sequences[0].tokens)


@probe("SamplingParams.max_tokens", "so many tokens, and the stop reason says so")
def max_tokens(world: World) -> None:
    sequence = sampled(world, types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])).sequences[0]
    check(len(sequence.tokens) == 3 and sequence.stop_reason == "length", f"{sequence}")


@probe("SamplingParams.seed", "the same one draws the same tokens again, others do not")
def sampling_seed(world: World) -> None:
    first = _tokens(world)
    check(_tokens(world) == first, "the same seed draws others")
    check(any(_tokens(world, seed=each) != first for each in range(6, 10)), "every seed draws the same")


@probe("SamplingParams.stop", "a token of what greedy sampling gave ends it there, and the stop reason says so")
def stop(world: World) -> None:
    whole = sampled(world).sequences[0].tokens
    sequence = sampled(world, types.SamplingParams(max_tokens=6, temperature=0.0, stop=[whole[1]])).sequences[0]
    expected = whole[: whole.index(whole[1]) + 1]
    check((sequence.tokens, sequence.stop_reason) == (expected, "stop"), f"{sequence}")


@probe("SamplingParams.temperature", "at 0 every seed gives the likeliest tokens, at 5 not")
def temperature(world: World) -> None:
    greedy = list(sampled(world, GREEDY).sequences[0].tokens)
    check(_tokens(world, temperature=0.0, seed=1) == greedy, "0 isn't greedy")
    check(_tokens(world, temperature=5.0) != greedy, "5 is greedy")


@probe("SamplingParams.top_k", "with 1 every draw is the likeliest token")
def top_k(world: World) -> None:
    check(_tokens(world, top_k=1, temperature=5.0) == list(sampled(world).sequences[0].tokens), "another token")


@probe("SamplingParams.top_p", "with next to nothing every draw is the likeliest token")
def top_p(world: World) -> None:
    check(_tokens(world, top_p=1e-6, temperature=1.0) == list(sampled(world).sequences[0].tokens), "another token")


@probe("EncodedTextChunk", "a prompt in two chunks is scored as the same prompt in one")
def text_chunk(world: World) -> None:
    halves = [types.EncodedTextChunk(tokens=TEXTS[0][:3]), types.EncodedTextChunk(tokens=TEXTS[0][3:])]
    found = done(world.sampler.compute_logprobs(types.ModelInput(chunks=halves)))
    expected = done(world.sampler.compute_logprobs(prompt()))
    check(all(close(one, other) for one, other in zip(found[1:], expected[1:], strict=True)), f"{found}")


def scored_after(world: World, chunk: Any) -> list[float | None]:
    """Log-probabilities of a prompt with a chunk among its tokens."""
    text = [types.EncodedTextChunk(tokens=each) for each in TEXTS[:2]]
    return list(done(world.sampler.compute_logprobs(types.ModelInput(chunks=[text[0], chunk, text[1]]))))


@probe("ImageChunk", "after another image the same text has other log-probabilities; what stands for an image has none")
def image_chunk(world: World) -> None:
    images = [types.ImageChunk(data=data, format="png", expected_tokens=1) for data in (PIXEL, BLACK)]
    one, other = (scored_after(world, image) for image in images)
    before = len(TEXTS[0])
    check(len(one) == before + 1 + len(TEXTS[1]), f"{len(one)} tokens")
    check(one[before] is None, f"an image's token has {one[before]}")
    same = [close(a or 0.0, b or 0.0) for a, b in zip(one, other, strict=True)]
    check(all(same[:before]), "the text before it has changed")
    check(not all(same[before + 1 :]), "the image doesn't count")


@probe("ImageAssetPointerChunk", "a prompt with it is scored", reasons.POINTERS)
def image_pointer(world: World) -> None:
    where = "https://images.test/pixel.png"
    scored_after(world, types.ImageAssetPointerChunk(format="png", location=where, expected_tokens=1))


@probe("DmelChunk", "a prompt with it is scored", reasons.SOUND)
def sound(world: World) -> None:
    scored_after(world, types.DmelChunk(dmel=bytes([0, 2, 1, 1, 0, 0, 0, 0])))
