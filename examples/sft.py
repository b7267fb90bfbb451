"""Supervised fine-tuning on thirteen sonnets: an ordinary tinker script.

It knows nothing of the machines under it. Where the session lives is in the
environment: TINKER_BASE_URL and TINKER_API_KEY.
"""

import argparse
import pathlib

import tinker
from tinker import types

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--base-model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch", type=int, default=4, help="sequences a step")
parser.add_argument("--length", type=int, default=64, help="tokens a sequence")
parser.add_argument("--rank", type=int, default=32)
parser.add_argument("--seed", type=int, default=17, help="of the LoRA initialisation")
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--name", default="sonnets", help="of the checkpoint that is saved at the end")
args = parser.parse_args()

service = tinker.ServiceClient()
training = service.create_lora_training_client(args.base_model, rank=args.rank, seed=args.seed).result()
tokenizer = training.get_tokenizer()
tokens = tokenizer.encode(pathlib.Path(__file__).with_name("sonnets.txt").read_text())


def datum(start: int) -> types.Datum:
    """One sequence of the text: predict each next token."""
    window = [tokens[(start + i) % len(tokens)] for i in range(args.length + 1)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(window[:-1]),
        loss_fn_inputs={"target_tokens": window[1:], "weights": [1.0] * args.length},
    )


print(f"model {training.model_id}", flush=True)
for step in range(args.steps):
    batch = [datum((step * args.batch + i) * args.length) for i in range(args.batch)]
    forward_backward = training.forward_backward(batch, "cross_entropy")
    optim = training.optim_step(types.AdamParams(learning_rate=args.learning_rate))
    loss = forward_backward.result().metrics["loss:sum"] / (args.batch * args.length)
    optim.result()
    print(f"step {step + 1}/{args.steps} loss {loss:.6f}", flush=True)

print(f"saved {training.save_state(args.name).result().path}", flush=True)
sampler = training.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(tokenizer.encode("Shall I compare thee to"))
params = types.SamplingParams(max_tokens=48, temperature=0.7, seed=args.seed)
sample = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
print("sample Shall I compare thee to" + tokenizer.decode(sample.sequences[0].tokens).replace("\n", " / "), flush=True)
service.close("success").result()
