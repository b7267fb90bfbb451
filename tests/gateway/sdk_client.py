"""What a user runs: the unmodified SDK, steered by lines on standard input; prints one JSON object an event.

    sdk_client.py SCENARIO BASE_MODEL

It imports nothing but the SDK. URL and key come from the SDK's own variables.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tinker
from tinker import types

DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
        "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
    },
)
ADAM = types.AdamParams(learning_rate=1e-3)


def say(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def train(base_model: str) -> None:
    """One step of training for each line of input, then a saved state."""
    client = tinker.ServiceClient().create_lora_training_client(base_model, rank=8).result()
    info = client.get_info()
    say("created", model_id=info.model_id, tokenizer=info.model_data.tokenizer_id, name=info.model_data.model_name)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        forward = client.forward_backward([DATUM], "cross_entropy")
        update = client.optim_step(ADAM)
        say("step", loss=forward.result().metrics["loss:sum"], metrics=update.result().metrics)
    say("saved", path=client.save_state("saved").result().path)


def outcome(future: Any) -> str:
    """How a call ends: "done", or the SDK's own exception."""
    try:
        future.result()
    except tinker.TinkerError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def outcomes(base_model: str) -> None:
    """For each line of input a step in three chunks, a save and a sample, and how each of them ends."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model, rank=8).result()
    sampler = service.create_sampling_client(base_model=base_model)
    say("created", model_id=client.get_info().model_id)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        forward, update = client.forward_backward([DATUM] * 300, "cross_entropy"), client.optim_step(ADAM)
        saved = client.save_state("saved")
        say("sent")
        params = types.SamplingParams(max_tokens=1)
        sampled = sampler.sample(types.ModelInput.from_ints([1, 2, 3]), num_samples=1, sampling_params=params)
        calls = {"forward": forward, "update": update, "save": saved, "sample": sampled}
        say("ended", **{name: outcome(future) for name, future in calls.items()})


def sample(base_model: str) -> None:
    """Samples from the base model, from weights just saved, and from a checkpoint by its path."""
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model, rank=8).result()
    path = training.save_state("saved").result().path
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=1)
    for name, client in (
        ("base", service.create_sampling_client(base_model=base_model).result()),
        ("saved", training.save_weights_and_get_sampling_client().result()),
        ("path", service.create_sampling_client(model_path=path).result()),
    ):
        tokens = client.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens
        say("sampled", client=name, tokens=list(tokens), base_model=client.get_base_model())


def many(base_model: str) -> None:
    """For each line of input as many samples as it says, of eight sampling clients; all are asked for at once."""
    service = tinker.ServiceClient()
    clients = [service.create_sampling_client(base_model=base_model).result() for _ in range(8)]
    say("ready", session_id=clients[0].holder.get_session_id())
    for line in sys.stdin:
        if line.strip() == "end":
            break
        futures = [
            clients[number % 8].sample(
                types.ModelInput.from_ints([3 + number % 200, 5, 7]),
                num_samples=4,
                sampling_params=types.SamplingParams(max_tokens=2, seed=number),
            )
            for number in range(int(line))
        ]
        say("asked")
        say("sampled", tokens=[[list(each.tokens) for each in future.result().sequences] for future in futures])


def resume(path: str) -> None:
    """Goes on from a checkpoint that another process saved: a new model, and a model that exists already."""
    service = tinker.ServiceClient()
    client = service.create_training_client_from_state_with_optimizer(path).result()
    info = client.get_info()
    say("created", model_id=info.model_id, tokenizer=info.model_data.tokenizer_id, name=info.model_data.model_name)
    client.forward_backward([DATUM], "cross_entropy").result()
    say("loaded", path=client.load_state(path).result().path)
    try:
        client.load_state("tinker://s-0123456789abcdef-0123456789abcdef:train:0/weights/x").result()
    except tinker.RequestFailedError as error:
        say("refused", message=str(error), category=str(error.category))
    say("saved", path=client.save_state("saved").result().path)


def listing(limit: str) -> None:
    """What the key has, by the calls of the SDK that list."""
    rest = tinker.ServiceClient().create_rest_client()
    page = rest.list_training_runs(limit=int(limit)).result()
    for run in page.training_runs:
        again = rest.get_training_run(run.training_run_id).result()
        paths = [one.tinker_path for one in rest.list_checkpoints(run.training_run_id).result().checkpoints]
        say("run", run=run.training_run_id, owner=again.model_owner, paths=paths, total=page.cursor.total_count)
    sessions = rest.list_sessions(limit=int(limit)).result().sessions
    made = [rest.get_session(session).result() for session in sessions]
    say(
        "sessions",
        ids=sessions,
        runs=[each.training_run_ids for each in made],
        samplers=[each.sampler_ids for each in made],
    )
    found = rest.search_sessions(types.SessionSearchRequest(limit=1)).result()
    while True:
        (one,) = found.sessions or [None]
        say("found", id=one and one.session_id, owner=one and one.owner, checkpoints=one and one.checkpoints_count)
        if found.next_cursor is None:
            break
        found = rest.search_sessions(types.SessionSearchRequest(limit=1, cursor=found.next_cursor)).result()
    every = rest.list_user_checkpoints(limit=int(limit)).result()
    say("all", paths=[one.tinker_path for one in every.checkpoints], total=every.cursor.total_count)
    if every.checkpoints:
        info = rest.get_weights_info_by_tinker_path(every.checkpoints[0].tinker_path).result()
        say("weights", base=info.base_model, rank=info.lora_rank)


def housekeeping(base_model: str) -> None:
    """A checkpoint is saved, told to expire, and removed."""
    service = tinker.ServiceClient()
    path = service.create_lora_training_client(base_model, rank=8).result().save_state("saved").result().path
    rest = service.create_rest_client()
    say("saved", path=path)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    say("expires")
    sys.stdin.readline()
    rest.delete_checkpoint_from_tinker_path(path).result()
    say("removed")
    sys.stdin.readline()


def copying(base_model: str) -> None:
    """A checkpoint is copied into a project that is told, and a model made of the copy."""
    service = tinker.ServiceClient()
    path = service.create_lora_training_client(base_model, rank=8).result().save_state("saved").result().path
    say("saved", path=path)
    project = sys.stdin.readline().strip()
    copy = service.create_rest_client().copy_weights(path, project, ttl_seconds=7200).result()
    say("copied", path=copy)
    say("loaded", model=service.create_training_client_from_state(copy).result().model_id)
    sys.stdin.readline()


def models(base_model: str) -> None:
    """What the server says it serves."""
    found = tinker.ServiceClient().get_server_capabilities().supported_models
    say("models", names=[model.model_name for model in found])


if __name__ == "__main__":
    try:
        scenarios = {
            "train": train,
            "sample": sample,
            "models": models,
            "resume": resume,
            "listing": listing,
            "many": many,
        }
        {**scenarios, "outcomes": outcomes, "housekeeping": housekeeping, "copying": copying}[sys.argv[1]](sys.argv[2])
    except Exception as error:
        say("error", type=type(error).__name__, message=str(error))
        raise
    say("end")
    os._exit(0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
