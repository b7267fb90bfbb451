"""A training loop of the unmodified SDK that does everything a loop can do, by a seed.

Mostly small steps; now and then a forward_backward that the SDK cuts in chunks, a save, a load, a sample, or going on
as a new model from a checkpoint. What it does in a step depends on seed and step alone, so that two runs of the same
length must be told the same. Everything it is told goes into a ledger, without ids and paths.
"""

import argparse
import json
import os
import pathlib
import random
import sys
import threading
import time

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--base-model", required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--name", required=True)
parser.add_argument("--ledger", required=True)
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--until", help="end after the step in which this file appears")
parser.add_argument("--linger", type=float, default=0.0, help="longest time, in seconds, between two steps")
parser.add_argument("--chunk", type=int, required=True, help="datums that the SDK puts in one chunk")
args = parser.parse_args()

MOST_MODELS = 6  # a TrainingSession holds a limited number of them


def note(event: str, **values: object) -> None:
    """Append one acknowledged fact to the ledger."""
    with pathlib.Path(args.ledger).open("a") as ledger:
        ledger.write(json.dumps({"event": event, **values}) + "\n")


def datum(rng: random.Random, length: int) -> types.Datum:
    """A walk over a small set of tokens: something to learn."""
    tokens = [rng.randrange(1000, 1050)]
    while len(tokens) <= length:
        tokens.append(1000 + (tokens[-1] * 7 + rng.randrange(2)) % 50)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


def train(model: tinker.TrainingClient, step: int, rng: random.Random) -> None:
    """One step: gradients, often in one call, sometimes in chunks or in two calls; then the update."""
    match rng.randrange(10):
        case 0:
            batches = [[datum(rng, 2) for _ in range(args.chunk + 1)]]
        case 1:
            batches = [[datum(rng, 16)], [datum(rng, 16)]]
        case _:
            batches = [[datum(rng, 24)]]
    passes = [model.forward_backward(batch, "cross_entropy") for batch in batches]
    adam = types.AdamParams(learning_rate=rng.choice([1e-3, 2e-3]), beta2=0.99, weight_decay=0.01, grad_clip_norm=1.0)
    update = model.optim_step(adam)
    losses = [each.result().metrics["loss:sum"] for each in passes]
    update.result()
    note("step", step=step, losses=losses)


def sample(sampler: tinker.SamplingClient, step: int) -> None:
    """A few tokens."""
    prompt, params = types.ModelInput.from_ints([1000, 1001, 1002]), types.SamplingParams(max_tokens=6, seed=step)
    note("sample", step=step, tokens=list(sampler.sample(prompt, 1, params).result().sequences[0].tokens))


def end_with_the_harness() -> None:
    """Its standard input closes when it is killed; nobody else would end this loop, which waits through everything."""
    sys.stdin.read()
    os._exit(3)


threading.Thread(target=end_with_the_harness, daemon=True).start()
service = tinker.ServiceClient()
model = service.create_lora_training_client(args.base_model, rank=4, seed=args.seed, train_unembed=False).result()
print("model", model.model_id, flush=True)
models, saved = 1, model.save_state(f"{args.name}-0").result().path
step = 0
while step < args.steps and not (args.until and pathlib.Path(args.until).exists()):
    step += 1
    rng = random.Random(f"{args.seed} {step}")
    train(model, step, rng)
    match rng.randrange(24):
        case 0 | 1 | 2:
            saved = model.save_state(f"{args.name}-{step}").result().path
            note("saved", step=step)
        case 3:
            model.load_state_with_optimizer(saved).result()
            note("loaded", step=step)
        case 4:
            model.load_state(saved).result()
            note("weights loaded", step=step)
        case 5 | 6:
            sample(model.save_weights_and_get_sampling_client().result(), step)
        case 7:
            sample(service.create_sampling_client(model_path=saved).result(), step)
        case 8 if models < MOST_MODELS:
            models += 1
            model = service.create_training_client_from_state_with_optimizer(saved).result()
            note("went on as another model", step=step)
    time.sleep(random.uniform(0, args.linger))
print("saved", model.save_state(args.name).result().path, flush=True)
service.close("success").result()
os._exit(0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
