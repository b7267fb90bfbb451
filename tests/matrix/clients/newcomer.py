"""A client that asks for a model where no TrainingSession is, with the unmodified SDK, and prints what it was told."""

import json
import os
import sys
import time

import tinker
from tinker import types

service = tinker.ServiceClient()
model = service.create_lora_training_client(sys.argv[1], rank=2, seed=5, train_unembed=False).result()
print(json.dumps({"told": "creation", "time": time.time()}), flush=True)
tokens = list(range(1000, 1012))
inputs = {"target_tokens": tokens[1:], "weights": [1.0] * len(tokens[1:])}
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
model.forward_backward([datum], "cross_entropy").result()
model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
loss = model.forward([datum], "cross_entropy").result().metrics["loss:sum"]
print(json.dumps({"told": "loss", "loss": loss}), flush=True)
service.close("success").result()
os._exit(0)  # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135)
