"""What a person writes without Everloop: transformers' `generate` over batches put together by hand.

    bare_samples.py MODEL_DIRECTORY PROMPT_TOKENS COMPLETION_TOKENS BATCH THREADS

Each line of input is a number of prompts, which are those of tinker_samples.py. Prints their completions' tokens.
"""

import json
import pathlib
import random
import sys
import time

import torch
from transformers import AutoModelForCausalLM

length, completion, batch, threads = map(int, sys.argv[2:6])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(pathlib.Path(sys.argv[1]), dtype=torch.float32)
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
print(json.dumps({"ready": True}), flush=True)

for line in sys.stdin:
    began = time.perf_counter()
    tokens = []
    for start in range(0, int(line), batch):
        rows = []
        for index in range(start, min(start + batch, int(line))):
            rng = random.Random(index)
            rows.append([rng.randrange(1000, 2000) for _ in range(length)])
        prompts = torch.tensor(rows)
        with torch.inference_mode():
            found = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=completion,
                do_sample=False,
            )
        tokens += found[:, length:].tolist()
    print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}), flush=True)
