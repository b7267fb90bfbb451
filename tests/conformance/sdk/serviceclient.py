"""Probes of ServiceClient and APIFuture."""

from __future__ import annotations

import asyncio
from typing import Any

import tinker

from tests.conformance.sdk.probing import probe
from tests.conformance.sdk.world import EVERY, RANK, World, check, close, done, loss, step, texts


@probe("ServiceClient.create_lora_training_client", "`get_training_run` names base model and rank")
def create_lora_training_client(world: World) -> None:
    run = done(world.rest.get_training_run(world.fresh().model_id))
    check((run.base_model, run.lora_rank) == (world.base_model, RANK), f"{run}")


@probe("ServiceClient.create_training_client_from_state", "`forward` gives the loss saved; the optimizer is new")
def create_training_client_from_state(world: World) -> None:
    client = done(world.service.create_training_client_from_state(world.state))
    check(close(loss(client), loss(world.training)), "another loss than that of the checkpoint")
    step(client)
    check(not close(loss(client), world.loss_after_two_steps), "a step as if the optimizer had been kept")


@probe(
    "ServiceClient.create_training_client_from_state_with_optimizer", "the next step ends where an unbroken run's does"
)
def create_training_client_from_state_with_optimizer(world: World) -> None:
    client = done(world.service.create_training_client_from_state_with_optimizer(world.state))
    step(client)
    check(close(loss(client), world.loss_after_two_steps), "another loss than that of an unbroken run")


@probe("ServiceClient.create_sampling_client", "`compute_logprobs` equals `forward` under the weights saved")
def create_sampling_client(world: World) -> None:
    world.check_samples_from(done(world.service.create_sampling_client(model_path=world.weights)), world.training)


@probe("ServiceClient.create_rest_client", "its `list_training_runs` has this process's run")
def create_rest_client(world: World) -> None:
    runs = done(world.service.create_rest_client().list_training_runs(limit=EVERY)).training_runs
    check(world.training.model_id in {run.training_run_id for run in runs}, "the run isn't listed")


@probe("ServiceClient.get_server_capabilities", "it names the base model that `get_info` names")
def get_server_capabilities(world: World) -> None:
    names = {model.model_name for model in world.service.get_server_capabilities().supported_models}
    check(world.training.get_info().model_data.model_name in names, f"{names}")


@probe("ServiceClient.create_custom_loss", "`forward_backward_custom` with it gives the loss of `cross_entropy`")
def create_custom_loss(world: World) -> None:
    def likelihood(logprobs: Any, weights: Any) -> Any:
        value = -(logprobs * weights).sum()
        return value, {"custom/value:sum": value}

    handle = done(world.service.create_custom_loss(likelihood, {"logprobs": 1, "weights": 1}))
    client = world.fresh()
    found = done(client.forward_backward_custom(texts(), handle)).metrics["custom/value:sum"]
    check(close(found, loss(client)), f"{found}")


@probe("ServiceClient.copy_weights", "`list_checkpoints` has the copy")
def copy_weights(world: World) -> None:
    copy = done(tinker.ServiceClient(project_id=world.project).copy_weights(world.state))
    check(world.checkpoint(copy) is not None, "the copy isn't listed")


@probe("ServiceClient.close", "the client takes no more calls; another of the same key goes on")
def close_service(world: World) -> None:
    service = tinker.ServiceClient()
    done(service.create_sampling_client(base_model=world.base_model))
    done(service.close("success"))
    try:
        done(service.create_sampling_client(base_model=world.base_model))
    except RuntimeError:
        loss(world.training)
    else:
        check(False, "a closed client makes samplers")


@probe("ServiceClient.get_console_url", "it names the session that is in `model_id`; there is no console")
def get_console_url(world: World) -> None:
    check(world.session in world.service.get_console_url(), world.service.get_console_url())


@probe("ServiceClient.get_telemetry", "what is logged is taken by the server, which keeps none of it")
def get_telemetry(world: World) -> None:
    check_telemetry(world.service)


@probe("ServiceClient.holder", "its session is the one in `model_id`")
def holder(world: World) -> None:
    check(world.service.holder.get_session_id() == world.session, world.session)


@probe("ServiceClient.*_async", "`create_sampling_client_async`: as the method of the same name")
def twins(world: World) -> None:
    sampler = asyncio.run(world.service.create_sampling_client_async(model_path=world.weights))
    world.check_samples_from(sampler, world.training)


def check_telemetry(client: Any) -> None:
    """That the server takes what a client logs."""
    telemetry = client.get_telemetry()
    check(telemetry is not None, "no telemetry")
    check(telemetry.log_exception_sync(ValueError("conformance")), "an event was dropped")
    check(telemetry._wait_until_drained_sync(), "an event was not taken")


def _future(world: World) -> Any:
    return world.training.forward(texts(), "cross_entropy")


def _is_result(world: World, found: Any) -> None:
    check(close(found.metrics["loss:sum"], loss(world.training)), f"{found.metrics}")


@probe("APIFuture.result", "the loss that another `forward` gives")
def result(world: World) -> None:
    _is_result(world, _future(world).result(timeout=60))


@probe("APIFuture.result_async", "the same")
def result_async(world: World) -> None:
    _is_result(world, asyncio.run(_future(world).result_async(timeout=60)))


@probe("APIFuture.future", "the same, of the future that it gives")
def future(world: World) -> None:
    _is_result(world, _future(world).future().result(timeout=60))


@probe("APIFuture.coroutine", "the same, awaited")
def coroutine(world: World) -> None:
    async def awaited() -> Any:
        return await _future(world).coroutine()

    _is_result(world, asyncio.run(awaited()))
