"""Goes on from a checkpoint with the unmodified SDK: prints the path under which it saves it again, then trains."""

import argparse
import os
import random

import tinker
from tinker import types

parser = argparse.ArgumentParser()
parser.add_argument("--path", required=True)
parser.add_argument("--name", required=True)
args = parser.parse_args()

service = tinker.ServiceClient()
model = service.create_training_client_from_state_with_optimizer(args.path).result()
print(model.save_state(args.name).result().path, flush=True)
tokens = [random.Random(1).randrange(1000, 1050) for _ in range(17)]
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 16},
)
loss = model.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
print(f"loss {loss:.6f}", flush=True)
service.close("success").result()
os._exit(0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
