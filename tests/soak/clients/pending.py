"""One program of the unmodified SDK with one call that is made in the middle of an outage.

It prepares, prints ``ready``, waits for a line on standard input, makes the call that ``--kind`` names, and then trains
on. Everything it is told goes into a ledger, without what differs from run to run: ids and paths.
"""

import argparse
import json
import os
import pathlib
import sys

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--kind", required=True)
parser.add_argument("--base-model", required=True)
parser.add_argument("--name", required=True)
parser.add_argument("--ledger", required=True)
args = parser.parse_args()

TOKENS = [1000 + i * i % 50 for i in range(33)]
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 32},
)
ADAM = types.AdamParams(learning_rate=1e-2)


def note(event: str, **values: object) -> None:
    """Append to the ledger."""
    with pathlib.Path(args.ledger).open("a") as ledger:
        ledger.write(json.dumps({"event": event, **values}) + "\n")


def new_model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A small adapter, the same each time."""
    return service.create_lora_training_client(args.base_model, rank=4, seed=5, train_unembed=False).result()


def forward_backward(model: tinker.TrainingClient) -> None:
    """Accumulate gradients."""
    note("loss", loss=model.forward_backward([DATUM], "cross_entropy").result().metrics["loss:sum"])


def optim_step(model: tinker.TrainingClient) -> None:
    """Apply them."""
    note("step", metrics=model.optim_step(ADAM).result().metrics)


def sample(sampler: tinker.SamplingClient) -> None:
    """Eight tokens."""
    prompt, params = types.ModelInput.from_ints(TOKENS[:3]), types.SamplingParams(max_tokens=8, seed=3)
    note("sample", tokens=list(sampler.sample(prompt, 1, params).result().sequences[0].tokens))


def outage() -> None:
    """Wait for it."""
    print("ready", flush=True)
    sys.stdin.readline()


service = tinker.ServiceClient()
match args.kind:
    case "sample":
        base = service.create_sampling_client(base_model=args.base_model).result()
        outage()
        sample(base)
    case "create_session":
        outage()
        other = tinker.ServiceClient()
        sample(other.create_sampling_client(base_model=args.base_model).result())
        other.close("success").result()
    case "create_model":
        outage()
        model = new_model(service)
    case _:
        model = new_model(service)
        forward_backward(model)
        if args.kind != "optim_step":
            optim_step(model)
        if args.kind in ("load_state", "create_from_state"):
            saved = model.save_state(f"{args.name}-start").result().path
            forward_backward(model)
            optim_step(model)
        outage()
        match args.kind:
            case "forward_backward":
                forward_backward(model)
                optim_step(model)
            case "optim_step":
                optim_step(model)
            case "save_state":
                model.save_state(f"{args.name}-pending").result()
            case "save_weights_for_sampler":
                sample(model.save_weights_and_get_sampling_client().result())
            case "load_state":
                model.load_state(saved).result()
            case "create_from_state":
                model = service.create_training_client_from_state_with_optimizer(saved).result()
            case unknown:
                raise ValueError(f"--kind: {unknown!r}")
if args.kind not in ("sample", "create_session"):
    forward_backward(model)
    optim_step(model)
    print("saved", model.save_state(args.name).result().path, flush=True)
service.close("success").result()
os._exit(0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
