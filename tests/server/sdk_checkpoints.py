"""A user's program that keeps house: what the SDK lets it do to its checkpoints. As `sdk_loop.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

from tests.server.sdk_loop import BASE_MODEL, batch, run_scenario, say


def listed(rest: Any, run: str) -> dict[str, str | None]:
    """When each checkpoint expires, by its id."""
    found = rest.list_checkpoints(run).result().checkpoints
    return {one.checkpoint_id: one.expires_at and one.expires_at.isoformat() for one in found}


def rolling(rounds: int) -> None:
    """Saves a checkpoint in each round and removes the one before, as recipes do."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    rest = service.create_rest_client()
    say(event="created", model_id=client.model_id)
    before = None
    for number in range(rounds):
        path = client.save_state(f"r{number}").result().path
        if before is not None:
            rest.delete_checkpoint_from_tinker_path(before).result()
        before = path
        say(event="round", number=number)
    say(event="listed", **listed(rest, client.model_id))
    service.close("success").result()
    say(event="done")


def lifetimes(user_metadata: dict[str, str]) -> None:
    """Saves that expire, and one that replaces another; then what is told of them, before and after changes."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1, user_metadata=user_metadata).result()
    rest = service.create_rest_client()
    say(event="created", model_id=client.model_id)
    client.forward_backward(batch(0, 2, 6), "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    say(event="run", user_metadata=rest.get_training_run(client.model_id).result().user_metadata)
    brief = client.save_state("brief", ttl_seconds=3600).result().path
    thin = client.save_weights_for_sampler("thin", ttl_seconds=7200).result().path
    ever = client.save_state("ever").result().path
    client.save_state("ever", overwrite=True).result()
    say(event="listed", **listed(rest, client.model_id))
    rest.set_checkpoint_ttl_from_tinker_path(brief, None).result()
    rest.set_checkpoint_ttl_from_tinker_path(ever, 86400).result()
    rest.delete_checkpoint_from_tinker_path(thin).result()
    say(event="listed", **listed(rest, client.model_id))
    calls: dict[str, Callable[[], Any]] = {
        "short": lambda: rest.set_checkpoint_ttl_from_tinker_path(brief, 60).result(),
        "missing": lambda: rest.delete_checkpoint_from_tinker_path(brief.replace("brief", "none")).result(),
        "missing ttl": lambda: rest.set_checkpoint_ttl_from_tinker_path(thin, 3600).result(),
        "save": lambda: client.save_state("other", ttl_seconds=60).result(),
        "load": lambda: service.create_training_client_from_state(thin).result(),
    }
    for name, call in calls.items():
        try:
            call()
        except tinker.TinkerError as error:
            say(event="refused", name=name, type=type(error).__name__, message=str(error))
    service.close("success").result()
    say(event="done")


def copying() -> None:
    """Copies that outlive their sources; what is sampled and loaded from them is told beside what they were."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    rest = service.create_rest_client()
    say(event="created", model_id=client.model_id)
    client.forward_backward(batch(0, 2, 6), "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    prompt = types.ModelInput.from_ints([5, 17, 9, 4, 33])

    def score(path: str) -> None:
        sampler = service.create_sampling_client(model_path=path)
        say(event="scores", scores=list(sampler.compute_logprobs(prompt).result()))

    sources = [client.save_state("half").result().path, client.save_weights_for_sampler("thin").result().path]
    score(sources[1])
    copies = [rest.copy_weights(path, "team", ttl_seconds=7200).result() for path in sources]
    for path, copy in zip(sources, copies, strict=True):
        run = copy.removeprefix("tinker://").split("/")[0]
        info = rest.get_training_run(run).result()
        say(event="copied", source=path, path=copy, rank=info.lora_rank, **listed(rest, run))
        rest.delete_checkpoint_from_tinker_path(path).result()
    say(event="removed")
    score(copies[1])
    made = service.create_training_client_from_state_with_optimizer(copies[0]).result()
    score(made.save_weights_for_sampler("again").result().path)
    for copy in copies:
        rest.delete_checkpoint_from_tinker_path(copy).result()
    service.close("success").result()
    say(event="done")


if __name__ == "__main__":
    run_scenario(rolling=rolling, lifetimes=lifetimes, copying=copying)
