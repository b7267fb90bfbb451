"""Asks for what can't be served and prints, as JSON, what the SDK raised and what came after."""

import functools
import json
import os
import sys
from collections.abc import Callable

import tinker
from tinker import types

base_model = sys.argv[1]
VOCABULARY = 49152


def datum(tokens: list[int], targets: list[int] | None = None, weights: list[float] | None = None) -> types.Datum:
    """One sequence; targets default to the tokens themselves."""
    targets = tokens if targets is None else targets
    weights = [1.0] * len(targets) if weights is None else weights
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )


def report(case: str, call: Callable[[], object]) -> None:
    """Print the class and text of what ``call`` raises; ``raised: null`` if it succeeds."""
    try:
        call()
    except (tinker.TinkerError, ValueError) as error:
        print(json.dumps({"case": case, "raised": type(error).__name__, "text": str(error)}), flush=True)
    else:
        print(json.dumps({"case": case, "raised": None, "text": ""}), flush=True)


def losses(model: tinker.TrainingClient) -> list[float]:
    """Loss of one fixed sequence without gradient: shows whether weights changed."""
    return [model.forward([datum([5, 6, 7, 8])], "cross_entropy").result().metrics["loss:sum"]]


service = tinker.ServiceClient()
report("unknown base model", lambda: service.create_lora_training_client("HuggingFaceTB/SmolLM2-136M").result())
report("rank 0", lambda: service.create_lora_training_client(base_model, rank=0).result())
report("rank too large", lambda: service.create_lora_training_client(base_model, rank=4096).result())

good = datum([11, 12, 13, 14, 15])
adam = types.AdamParams(learning_rate=1e-2)
bad = {
    "token beyond the vocabulary": datum([11, 12, VOCABULARY]),
    "target beyond the vocabulary": datum([11, 12, 13], targets=[12, 13, VOCABULARY]),
    "length mismatch": datum([11, 12, 13], targets=[12, 13]),
    "weights mismatch": datum([11, 12, 13], weights=[1.0]),
}

# The reference: one good pass and a step, on a model that never saw anything bad.
clean = service.create_lora_training_client(base_model, rank=8, seed=9).result()
clean.forward_backward([good], "cross_entropy").result()
clean.optim_step(adam).result()
expected = losses(clean)

tried = service.create_lora_training_client(base_model, rank=8, seed=9).result()


def forward_backward(data: list[types.Datum]) -> None:
    """A pass over ``data`` on the model that sees bad input."""
    tried.forward_backward(data, "cross_entropy").result()


forward_backward([good])
for case, datum_ in bad.items():
    report(case, functools.partial(forward_backward, [datum_]))
report("unknown loss", lambda: tried.forward_backward([good], "cross_entropie").result())
tried.optim_step(adam).result()
print(json.dumps({"case": "gradients unchanged", "expected": expected, "got": losses(tried)}), flush=True)

# In each position of a request that the SDK cuts into three chunks.
chunk = int(sys.argv[2])
for position in range(3):
    data = [good] * (3 * chunk)
    data[position * chunk] = bad["length mismatch"]
    report(f"chunk {position}", functools.partial(forward_backward, data))
    report(f"after chunk {position}", functools.partial(forward_backward, [good]))
# Good parts of the calls that failed are in the window, and must not be applied: the step says so, once.
report("step beside parts", lambda: tried.optim_step(adam).result())
forward_backward([good])
report("step after chunks", lambda: tried.optim_step(adam).result())
service.close("success").result()
os._exit(0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
