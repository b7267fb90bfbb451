"""The loop that a person writes without Everloop: PyTorch and PEFT, no service, nothing saved.

    bare.py MODEL_DIRECTORY ADAPTER_FILE BATCH LENGTH RANK THREADS

ADAPTER_FILE holds the LoRA weights to begin with. Each line of input is a number of steps to make.
"""

import json
import pathlib
import random
import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

batch, length, rank, threads = map(int, sys.argv[3:7])
torch.set_num_threads(threads)
base = AutoModelForCausalLM.from_pretrained(pathlib.Path(sys.argv[1]), dtype=torch.float32)
modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=32, target_modules=modules))
begin = {
    name.removeprefix("weights/").replace(".weight", ".default.weight"): tensor
    for name, tensor in load_file(sys.argv[2]).items()
    if name.startswith("weights/")
}
missing = {name for name, leaf in model.named_parameters() if leaf.requires_grad} ^ begin.keys()
assert not missing, missing
model.load_state_dict(begin, strict=False)
leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
optimizer = torch.optim.AdamW(leaves, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
print(json.dumps({"ready": True}), flush=True)

step = 0
for line in sys.stdin:
    losses = []
    began = time.perf_counter()
    for _ in range(int(line)):
        rng = random.Random(step)
        tokens = torch.tensor([[rng.randrange(1000, 2000) for _ in range(length + 1)] for _ in range(batch)])
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
    print(json.dumps({"seconds": time.perf_counter() - began, "losses": losses}), flush=True)
