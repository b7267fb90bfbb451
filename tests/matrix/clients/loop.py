"""A training loop with the unmodified SDK that stops before each of its moments until it is told to go on.

Standard output has a line of JSON for each moment it comes to (`at`) and for each answer it was told (`told`, with
the time); a line on standard input lets it go on. What it was told goes to a ledger too, written by this process
alone. After each round it asks with `round` and goes on with another one unless the answer is `end`.
"""

import argparse
import json
import os
import pathlib
import random
import sys
import time

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--base-model", required=True)
parser.add_argument("--name", required=True)
parser.add_argument("--ledger", required=True)
parser.add_argument("--chunk", type=int, required=True, help="how many datums the SDK puts in one chunk")
args = parser.parse_args()
SEED, RANK, LENGTH = 5, 2, 12


def ask(**question: object) -> str:
    """Print a question and wait for its answer."""
    print(json.dumps(question), flush=True)
    return sys.stdin.readline().strip()


def told(moment: str, **facts: object) -> None:
    """Note what was told."""
    with pathlib.Path(args.ledger).open("a") as ledger:
        ledger.write(json.dumps({"told": moment, **facts}) + "\n")
    print(json.dumps({"told": moment, "time": time.time()}), flush=True)


def batch(seed: int, sequences: int, length: int) -> list[types.Datum]:
    """Deterministic sequences of a walk over a small set of tokens: something to learn."""
    datums = []
    for i in range(sequences):
        rng = random.Random(seed * 1000 + i)
        tokens = [rng.randrange(1000, 1050)]
        while len(tokens) <= length:
            tokens.append(1000 + (tokens[-1] * 7 + rng.randrange(2)) % 50)
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        datums.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return datums


def adam(number: int) -> types.AdamParams:
    """Parameters of a step; no two in a row are equal."""
    return types.AdamParams(learning_rate=1e-3 * (1 + number % 3), beta2=0.99, weight_decay=0.01, grad_clip_norm=1.0)


def create(seed: int) -> tinker.TrainingClient:
    """A new small model."""
    return service.create_lora_training_client(args.base_model, rank=RANK, seed=seed, train_unembed=False).result()


def pass_over(model: tinker.TrainingClient, data: list[types.Datum]) -> float:
    """One forward_backward; its loss."""
    return float(model.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])


service = tinker.ServiceClient()
model = create(SEED)
told("start", model_id=model.model_id)
number = 0
while ask(round=number) != "end":
    number += 1
    ask(at="create_model")
    fresh = create(SEED + number)
    told("create_model", loss=fresh.forward(batch(number, 1, LENGTH), "cross_entropy").result().metrics["loss:sum"])
    ask(at="accepted")
    told("accepted", loss=pass_over(model, batch(5 * number, 2, LENGTH)))
    ask(at="forward_backward")
    told("forward_backward", loss=pass_over(model, batch(2 * number, 4, LENGTH)))
    ask(at="between_chunks")
    told("between_chunks", loss=pass_over(model, batch(2 * number + 1, args.chunk + 16, 1)))
    ask(at="between_pass_and_step")
    told("between_pass_and_step", metrics=model.optim_step(adam(2 * number)).result().metrics)
    sampler = model.save_weights_and_get_sampling_client().result()
    ask(at="sample")
    prompt, wanted = types.ModelInput.from_ints([1000, 1001]), types.SamplingParams(max_tokens=6, seed=number)
    told("sample", tokens=list(sampler.sample(prompt, 1, wanted).result().sequences[0].tokens))
    ask(at="before_manifest")
    saved = model.save_state(f"{args.name}-{number}").result().path
    told("before_manifest", path=saved)
    ask(at="after_manifest")
    told("after_manifest", path=model.save_state(f"{args.name}-{number}-again").result().path)
    loss = pass_over(model, batch(3 * number, 2, LENGTH))
    ask(at="optim_step")
    told("optim_step", loss=loss, metrics=model.optim_step(adam(2 * number + 1)).result().metrics)
    ask(at="load_state")
    loaded = model.load_state_with_optimizer(saved).result()
    told("load_state", loaded=loaded.path)
    ask(at="idle")
    first = model.forward_backward(batch(4 * number, 2, LENGTH), "cross_entropy")
    step = model.optim_step(adam(number))  # sent before the pass has ended, as loops do
    told("idle", loss=first.result().metrics["loss:sum"], metrics=step.result().metrics)
told("end", path=model.save_state(args.name).result().path)
service.close("success").result()
os._exit(0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
