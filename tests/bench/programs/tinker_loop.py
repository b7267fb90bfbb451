"""The same loop as `bare.py` with the unmodified tinker SDK.

    tinker_loop.py BASE_MODEL BATCH LENGTH RANK

Saves its adapter before the first step. Each line of input is a number of steps to make.
"""

import json
import random
import sys
import time

import tinker
from tinker import types

batch, length, rank = map(int, sys.argv[2:5])
service = tinker.ServiceClient()
model = service.create_lora_training_client(sys.argv[1], rank=rank, seed=17).result()
saved = model.save_state("begin").result().path
adam = types.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12)
print(json.dumps({"ready": True, "model": model.model_id, "saved": saved}), flush=True)

step = 0
for line in sys.stdin:
    losses = []
    began = time.perf_counter()
    for _ in range(int(line)):
        rng = random.Random(step)
        data = []
        for _ in range(batch):
            tokens = [rng.randrange(1000, 2000) for _ in range(length + 1)]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        forward_backward = model.forward_backward(data, "cross_entropy")
        optim = model.optim_step(adam)
        losses.append(forward_backward.result().metrics["loss:sum"])
        optim.result()
        step += 1
    print(json.dumps({"seconds": time.perf_counter() - began, "losses": losses}), flush=True)
service.close("success").result()
