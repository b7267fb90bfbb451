"""Probes of TrainingClient."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

from tests.conformance.sdk.probing import probe
from tests.conformance.sdk.serviceclient import check_telemetry
from tests.conformance.sdk.world import ADAM, RANK, TEXTS, World, check, close, done, loss, step, texts


@probe("TrainingClient.forward", "the log-probabilities that `compute_logprobs` gives of the same weights")
def forward(world: World) -> None:
    world.check_samples_from(world.sampler, world.training)


@probe("TrainingClient.forward_backward", "after `optim_step` the loss is lower")
def forward_backward(world: World) -> None:
    client = world.fresh()
    before = done(client.forward_backward(texts(), "cross_entropy")).metrics["loss:sum"]
    done(client.optim_step(ADAM))
    check(loss(client) < before, "the loss is no lower")


@probe("TrainingClient.forward_backward_custom", "a step by one's own loss ends where `cross_entropy` ends")
def forward_backward_custom(world: World) -> None:
    client = world.fresh()
    done(client.forward_backward_custom(texts(), _negative_likelihood))
    done(client.optim_step(ADAM))
    check(close(loss(client), loss(world.training)), f"{loss(client)}")


def _negative_likelihood(_data: Any, logprobs: list[Any]) -> Any:
    value = -sum(each.sum() for each in logprobs)
    return value, {"likelihood": float(value)}


@probe(
    "TrainingClient.optim_step",
    "the weights change by it and not before, to where the same gradients led another model",
)
def optim_step(world: World) -> None:
    client = world.fresh()
    before = loss(client)
    done(client.forward_backward(texts(), "cross_entropy"))
    check(close(loss(client), before), "gradients alone changed the weights")
    done(client.optim_step(ADAM))
    check(close(loss(client), loss(world.training)), "another step than that of the same gradients")


@probe("TrainingClient.save_state", "`list_checkpoints` has it, and a model made from it its loss")
def save_state(world: World) -> None:
    path = world.saved()
    check(world.checkpoint(path) is not None, "it isn't listed")
    check(close(loss(done(world.service.create_training_client_from_state(path))), loss(world.training)), path)


@probe("TrainingClient.save_weights_for_sampler", "`list_checkpoints` has them, and a sampler of them their weights")
def save_weights_for_sampler(world: World) -> None:
    path = done(world.training.save_weights_for_sampler("for-samplers")).path
    check(world.checkpoint(path) is not None, "it isn't listed")
    world.check_samples_from(done(world.service.create_sampling_client(model_path=path)), world.training)


@probe(
    "TrainingClient.save_weights_and_get_sampling_client", "its sampler stays on these weights when training goes on"
)
def save_weights_and_get_sampling_client(world: World) -> None:
    client = world.fresh()
    step(client)
    sampler = done(client.save_weights_and_get_sampling_client())
    step(client)
    world.check_samples_from(sampler, world.training)


@probe("TrainingClient.save_weights_external", "its files come from `get_external_weights_urls`")
def save_weights_external(world: World) -> None:
    path = done(world.training.save_weights_external("exported")).path
    files = done(world.rest.get_external_weights_urls(path)).urls
    for url in files.values():
        with urllib.request.urlopen(url, timeout=60) as answer:
            check(bool(answer.read(1)), f"{url} is empty")
    check("adapter_config.json" in files, f"{list(files)}")


@probe("TrainingClient.load_state", "`forward` gives the loss saved; the optimizer is new")
def load_state(world: World) -> None:
    client = _elsewhere(world)
    done(client.load_state(world.state))
    check(close(loss(client), loss(world.training)), "another loss than that of the checkpoint")
    step(client)
    check(not close(loss(client), world.loss_after_two_steps), "a step as if the optimizer had been kept")


@probe("TrainingClient.load_state_with_optimizer", "the next step ends where an unbroken run's does")
def load_state_with_optimizer(world: World) -> None:
    client = _elsewhere(world)
    done(client.load_state_with_optimizer(world.state))
    step(client)
    check(close(loss(client), world.loss_after_two_steps), "another loss than that of an unbroken run")


def _elsewhere(world: World) -> Any:
    client = world.fresh(seed=11)
    step(client)
    check(not close(loss(client), loss(world.training)), "two seeds, one adapter")
    return client


@probe("TrainingClient.create_sampling_client", "`compute_logprobs` equals `forward` under the weights saved")
def create_sampling_client(world: World) -> None:
    world.check_samples_from(done(world.training.create_sampling_client(world.weights)), world.training)


@probe("TrainingClient.get_info", "base model and rank as `get_training_run` has them")
def get_info(world: World) -> None:
    info, run = world.training.get_info(), done(world.rest.get_training_run(world.training.model_id))
    found = (info.model_id, info.model_data.model_name, info.lora_rank)
    check(found == (run.training_run_id, run.base_model, run.lora_rank) and info.lora_rank == RANK, f"{found}")


@probe("TrainingClient.get_tokenizer", "it decodes a text of the base model, found by the name that the server gives")
def get_tokenizer(world: World) -> None:
    check(world.training.get_tokenizer().decode(TEXTS[0][:2]) == "w5 w17", "another tokenizer")


@probe("TrainingClient.get_console_url", "it names the session that is in `model_id`; there is no console")
def get_console_url(world: World) -> None:
    check(world.session in world.training.get_console_url(), world.training.get_console_url())


@probe("TrainingClient.get_telemetry", "what is logged is taken by the server, which keeps none of it")
def get_telemetry(world: World) -> None:
    check_telemetry(world.training)


@probe("TrainingClient.*_async", "`forward_backward_async`, `optim_step_async`: as the methods of the same name")
def twins(world: World) -> None:
    client = world.fresh()

    async def stepped() -> None:
        forward_backward = await client.forward_backward_async(texts(), "cross_entropy")
        optim_step = await client.optim_step_async(ADAM)
        await forward_backward
        await optim_step

    asyncio.run(stepped())
    check(close(loss(client), loss(world.training)), "another step than that of the plain methods")
