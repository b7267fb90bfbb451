"""Single samples with the unmodified tinker SDK, as recipes of reinforcement learning send them: one request each.

    tinker_samples.py BASE_MODEL PROMPT_TOKENS COMPLETION_TOKENS

Each line of input is a number of requests, sent one by one without waiting. Prints their tokens.
"""

import json
import random
import sys
import time

import tinker
from tinker import types

length, completion = map(int, sys.argv[2:4])
sampler = tinker.ServiceClient().create_sampling_client(base_model=sys.argv[1]).result()
params = types.SamplingParams(max_tokens=completion, temperature=0.0, stop=[])
print(json.dumps({"ready": True}), flush=True)

for line in sys.stdin:
    began = time.perf_counter()
    futures = []
    for index in range(int(line)):
        rng = random.Random(index)
        prompt = types.ModelInput.from_ints([rng.randrange(1000, 2000) for _ in range(length)])
        futures.append(sampler.sample(prompt, 1, params))
    tokens = [list(future.result().sequences[0].tokens) for future in futures]
    print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}), flush=True)
