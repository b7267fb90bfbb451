"""An ordinary program of a user: it knows the SDK, an address and a key. Run by the interpreter that has only the SDK.

    python sdk_loop.py SCENARIO '{"seed": 1, ...}'

prints one JSON line per thing done; an exception ends it with its traceback, as it would a user's script.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tinker
from tinker import types

BASE_MODEL = "everloop/tiny-llama"


def say(**fields: Any) -> None:
    """Prints what was done."""
    print(json.dumps(fields), flush=True)


def batch(step: int, sequences: int, length: int) -> list[types.Datum]:
    """`sequences` texts of `length` random tokens that depend on `step` only."""
    rng = random.Random(step)
    data = []
    for _ in range(sequences):
        tokens = [rng.randrange(3, 300) for _ in range(length + 1)]
        data.append(datum(tokens[:-1], tokens[1:]))
    return data


def datum(tokens: list[int], targets: list[int]) -> types.Datum:
    """One text for cross_entropy."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": types.TensorData(data=[1.0] * len(targets), dtype="float32", shape=[len(targets)]),
        },
    )


def train(
    seed: int, steps: int, sequences: int, length: int, rank: int = 8, save_after: int = 0, until: str = ""
) -> None:
    """A loop of `steps` steps, or until there is a file, then a checkpoint; with `save_after` one after so many too."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(BASE_MODEL, rank=rank, seed=seed).result()
    say(event="created", model_id=client.model_id)
    for step in range(steps):
        forward_backward = client.forward_backward(batch(step, sequences, length), "cross_entropy")
        optim = client.optim_step(types.AdamParams(learning_rate=1e-2))
        result = forward_backward.result()
        optim.result()
        say(event="step", step=step, loss=result.metrics["loss:sum"])
        if step + 1 == save_after:
            say(event="half", path=client.save_state("half").result().path)
            say(event="half", path=client.save_weights_for_sampler("half").result().path)
        if until and Path(until).exists():
            break
    saved = client.save_state("final").result()
    say(event="saved", path=saved.path)
    service.close("success").result()
    say(event="done")


def resume(path: str, optimizer: bool, start: int, steps: int, sequences: int, length: int) -> None:
    """Goes on from a checkpoint that another process saved after `start` steps."""
    service = tinker.ServiceClient()
    make = (
        service.create_training_client_from_state_with_optimizer
        if optimizer
        else service.create_training_client_from_state
    )
    try:
        client = make(path).result()
    except tinker.RequestFailedError as error:
        say(event="refused", category=str(error.category), message=str(error))
        say(event="done")
        return
    info = client.get_info()
    say(event="created", model_id=client.model_id, rank=info.lora_rank, base=info.model_data.model_name)
    for step in range(start, steps):
        forward_backward = client.forward_backward(batch(step, sequences, length), "cross_entropy")
        optim = client.optim_step(types.AdamParams(learning_rate=1e-2))
        result = forward_backward.result()
        optim.result()
        say(event="step", step=step, loss=result.metrics["loss:sum"])
    say(event="saved", path=client.save_state("final").result().path)
    loaded = client.load_state_with_optimizer(path).result()
    forward_backward = client.forward_backward(batch(start, sequences, length), "cross_entropy")
    say(event="again", path=loaded.path, loss=forward_backward.result().metrics["loss:sum"])
    service.close("success").result()
    say(event="done")


def reload(seed: int, path: str) -> None:
    """Loads a checkpoint after each of two steps, without optimizer and with it, and goes on if it is refused."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=seed).result()
    say(event="created", model_id=client.model_id)
    for step, load in enumerate((client.load_state, client.load_state_with_optimizer)):
        client.forward_backward(batch(step, 4, 16), "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        try:
            load(path).result()
        except tinker.RequestFailedError as error:
            say(event="refused", category=str(error.category), message=str(error))
    client.save_state("final").result()
    service.close("success").result()
    say(event="done")


def everything(seed: int) -> None:
    """Each call of the SDK that the pod serves, once, results printed."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed).result()
    info = client.get_info()
    say(
        event="created",
        model_id=client.model_id,
        base=info.model_data.model_name,
        rank=info.lora_rank,
        lora=info.is_lora,
    )

    forward = client.forward(batch(0, 3, 16), "cross_entropy").result()
    say(
        event="forward",
        loss=forward.metrics["loss:sum"],
        lengths=[len(o["logprobs"].data) for o in forward.loss_fn_outputs],
    )
    first = client.forward_backward(batch(0, 3, 16), "cross_entropy").result()
    say(event="forward_backward", loss=first.metrics["loss:sum"])
    say(event="optim_step", metrics=client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics)
    say(event="save_state", path=client.save_state("one").result().path)
    sampler_path = client.save_weights_for_sampler("served").result().path
    say(event="save_weights_for_sampler", path=sampler_path)

    params = types.SamplingParams(max_tokens=6, seed=11, temperature=1.0, stop=[])
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    samplers = {
        "named": client.create_sampling_client(sampler_path).result(),
        "ephemeral": client.save_weights_and_get_sampling_client().result(),
        "base": service.create_sampling_client(base_model=BASE_MODEL).result(),
    }
    for name, sampler in samplers.items():
        answer = sampler.sample(prompt, 2, params).result()
        say(
            event="sample",
            sampler=name,
            tokens=[sequence.tokens for sequence in answer.sequences],
            logprobs=[len(sequence.logprobs or []) for sequence in answer.sequences],
            reasons=[sequence.stop_reason for sequence in answer.sequences],
        )
    text = types.ModelInput.from_ints([5, 6, 7, 8, 9])
    forward = client.forward([datum([5, 6, 7, 8], [6, 7, 8, 9])], "cross_entropy").result()
    trained = list(forward.loss_fn_outputs[0]["logprobs"].data)
    current = client.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    asked = current.sample(text, 1, greedy, True, topk_prompt_logprobs=3, topk_sample_logprobs=2).result()
    last = current.sample(text, 1, greedy, True, prompt_logprobs_last_n=2).result()
    likely = [[token for token, _ in each or []] for each in (asked.topk_prompt_logprobs or [])[1:]]
    dense = types.TensorData(data=[token for row in likely for token in row], dtype="int64", shape=[4, 3])
    named = current.sample(text, 1, greedy, target_prompt_logprobs=dense, prompt_alt_tokens_k=2).result()
    sparse = types.TensorData(
        data=likely[-1][:2],
        dtype="int64",
        shape=[4, 3],
        sparse_crow_indices=[0, 0, 0, 0, 2],
        sparse_col_indices=[0, 2],
    )
    row = current.sample(text, 1, greedy, target_prompt_logprobs=sparse).result().target_prompt_logprobs
    alternatives = named.prompt_alt_tokens
    say(
        event="logprobs",
        trained=trained,
        computed=current.compute_logprobs(text).result(),
        prompt=asked.prompt_logprobs,
        prompt_likeliest=asked.topk_prompt_logprobs,
        sampled=[asked.sequences[0].tokens, asked.sequences[0].logprobs],
        likeliest=asked.sequences[0].topk_logprobs,
        last=last.prompt_logprobs,
        named=named.target_prompt_logprobs.tolist(),
        named_row=[row.shape, row.sparse_crow_indices, row.sparse_col_indices, row.data],
        alternatives=[alternatives.tokens.tolist(), alternatives.logprobs.tolist()],
    )
    service.close("success").result()
    say(event="done")


def chunks(seed: int, sequences: int) -> None:
    """A request of several chunks equals one request; a bad datum in any chunk fails it, and none of it is applied."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed).result()
    data = batch(0, sequences, 12)
    whole = client.forward_backward(data, "cross_entropy").result()
    say(event="chunked", loss=whole.metrics["loss:sum"], outputs=len(whole.loss_fn_outputs))
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    reference = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    for position in range(sequences):
        bad = list(data)
        bad[position] = datum([4, 5, 6], [5, 6, 100_000])
        try:
            client.forward_backward(bad, "cross_entropy").result()
        except tinker.RequestFailedError as error:
            say(event="refused", position=position, category=str(error.category), message=str(error))
        again = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
        say(event="unharmed", position=position, before=reference, after=again)
    client.forward_backward(data, "cross_entropy").result()
    try:
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    except tinker.RequestFailedError as error:
        say(event="spoilt", category=str(error.category), message=str(error))
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    after = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    clean = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed).result()
    for _ in range(2):
        clean.forward_backward(data, "cross_entropy").result()
        clean.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    say(event="next", after=after, clean=clean.forward(data, "cross_entropy").result().metrics["loss:sum"])
    service.close("success").result()
    say(event="done")


def refusals() -> None:
    """Operations with bad content end as RequestFailedError of category user; the message names the field."""
    service = tinker.ServiceClient()

    def tried(name: str, call: Any) -> None:
        try:
            call()
        except tinker.RequestFailedError as error:
            say(event="refused", name=name, category=str(error.category), message=str(error))
        else:
            say(event="accepted", name=name)

    tried("rank", lambda: service.create_lora_training_client(BASE_MODEL, rank=0).result())
    tried("base_model", lambda: service.create_lora_training_client("no/such-model", rank=4).result())
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    tried("loss", lambda: client.forward_backward(batch(0, 1, 4), "dro").result())
    tried("name", lambda: client.save_state("a/b").result())
    tried("save", lambda: client.save_state("same").result())
    tried("again", lambda: client.save_state("same").result())
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    prompt = types.ModelInput.from_ints([5, 6])
    tried("max_tokens", lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=10_000)).result())
    tried(
        "token",
        lambda: sampler.sample(types.ModelInput.from_ints([5, 10_000]), 1, types.SamplingParams(max_tokens=2)).result(),
    )
    short = types.SamplingParams(max_tokens=2)
    tried("topk", lambda: sampler.sample(prompt, 1, short, topk_prompt_logprobs=10_000).result())
    tried("good", lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result())
    service.close("success").result()
    say(event="done")


def abandon(until: str, end: str) -> None:
    """Cancels a large sample once the file `until` is there; a small one behind it has its answer. Waits for `end`."""
    service = tinker.ServiceClient()
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    large = sampler.sample(prompt, 1024, types.SamplingParams(max_tokens=250, seed=1, stop=[]))
    while not Path(until).exists():
        time.sleep(0.01)
    large.future().cancel()
    small = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2, seed=1, stop=[])).result()
    say(event="sampled", tokens=small.sequences[0].tokens)
    while not Path(end).exists():
        time.sleep(0.01)
    service.close("success").result()
    say(event="done")


def many(samples: int) -> None:
    """Many samples at a time of different lengths, one of them refused, by one client."""
    service = tinker.ServiceClient()
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    futures = [
        sampler.sample(
            types.ModelInput.from_ints([5, 6, 10_000 if index == samples // 2 else 7]),
            1,
            types.SamplingParams(max_tokens=20 + index, seed=index, stop=[]),
        )
        for index in range(samples)
    ]
    answers: list[list[int] | str] = []
    for future in futures:
        try:
            answers.append(list(future.result().sequences[0].tokens))
        except tinker.RequestFailedError as error:
            answers.append(str(error.category))
    say(event="sampled", answers=answers)
    service.close("success").result()
    say(event="done")


def run_scenario(**scenarios: Callable[..., None]) -> NoReturn:
    """Runs the scenario that the command line names, with the arguments that it gives as JSON, and ends the process."""
    code = 1
    try:
        scenarios[sys.argv[1]](**json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
        code = 0
    finally:
        if code:
            traceback.print_exc()
        # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135).
        os._exit(code)


if __name__ == "__main__":
    run_scenario(
        train=train,
        resume=resume,
        reload=reload,
        everything=everything,
        chunks=chunks,
        refusals=refusals,
        abandon=abandon,
        many=many,
    )
