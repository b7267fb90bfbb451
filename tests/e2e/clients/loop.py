"""A training loop with the unmodified SDK that keeps a ledger of what it was told.

Every acknowledged result is appended to the ledger as a JSON line, by this process, so that
nothing the server says of itself enters it.
"""

import argparse
import json
import os
import pathlib
import random

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--base-model", required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--ranks", type=int, nargs="+", default=[16], help="one model for each, trained in turns")
parser.add_argument("--seed", type=int, default=5)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--length", type=int, default=48)
parser.add_argument("--name", required=True)
parser.add_argument("--ledger", required=True)
parser.add_argument("--until", help="end after the step in which this file appears")
args = parser.parse_args()


def note(**entry: object) -> None:
    """Append one acknowledged fact to the ledger."""
    with pathlib.Path(args.ledger).open("a") as ledger:
        ledger.write(json.dumps(entry) + "\n")


def batch(step: int) -> list[types.Datum]:
    """Deterministic sequences of a walk over a small set of tokens: something to learn."""
    datums = []
    for i in range(args.batch):
        rng = random.Random(step * 1000 + i)
        tokens = [rng.randrange(1000, 1050)]
        while len(tokens) <= args.length:
            tokens.append(1000 + (tokens[-1] * 7 + rng.randrange(2)) % 50)
        weights = [1.0] * args.length
        datums.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
            )
        )
    return datums


service = tinker.ServiceClient()
models = {
    rank: service.create_lora_training_client(args.base_model, rank=rank, seed=args.seed).result()
    for rank in args.ranks
}
for rank, model in models.items():
    note(event="model", rank=rank, model_id=model.model_id)
    note(event="saved", rank=rank, step=0, path=model.save_state(f"{args.name}-initial").result().path)
step = 0
while step < args.steps and not (args.until and pathlib.Path(args.until).exists()):
    step += 1
    for rank, model in models.items():
        forward_backward = model.forward_backward(batch(step), "cross_entropy")
        rate = 1e-3 * (1 + step % 3)
        optim = model.optim_step(
            types.AdamParams(learning_rate=rate, beta2=0.99, weight_decay=0.01, grad_clip_norm=1.0)
        )
        result = forward_backward.result()
        loss = result.metrics["loss:sum"] / (args.batch * args.length)
        optim.result()
        note(event="step", rank=rank, step=step, loss=loss)
    print(f"step {step}/{args.steps} loss {loss:.6f}", flush=True)
for rank, model in models.items():
    note(event="saved", rank=rank, step=step, path=model.save_state(args.name).result().path)
sampler = models[args.ranks[0]].save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints([1000, 1001, 1002])
sample = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=1.0, seed=3)).result()
note(event="sample", tokens=list(sample.sequences[0].tokens))
service.close("success").result()
os._exit(0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
