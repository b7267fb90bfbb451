"""An RLJob's own loop: supervised fine-tuning on thirteen sonnets that goes on where its predecessor was lost.

An ordinary program on the unmodified tinker SDK. What makes it one that an RLJob can run is said in docs/rljob.md:
it goes on from EVERLOOP_RESUME_FROM after iteration EVERLOOP_RESUME_ITERATION, and appends a line of JSON to
progress.jsonl in EVERLOOP_STATE_DIR for each iteration that is finished, and to evaluation.jsonl for each evaluation.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from datetime import UTC, datetime

import tinker
from tinker import types

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--base-model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--batch", type=int, default=4, help="sequences an iteration")
parser.add_argument("--length", type=int, default=64, help="tokens a sequence")
parser.add_argument("--rank", type=int, default=32)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--save-every", type=int, default=1, help="iterations from one checkpoint to the next")
parser.add_argument("--evaluate-every", type=int, default=5, help="iterations from one evaluation to the next")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of thought after each iteration")
args = parser.parse_args()

state = pathlib.Path(os.environ["EVERLOOP_STATE_DIR"])
checkpoint = os.environ.get("EVERLOOP_RESUME_FROM", "")
done = int(os.environ.get("EVERLOOP_RESUME_ITERATION", "0"))
seed = int(os.environ.get("EVERLOOP_SEED", "17"))


def report(name: str, **fields: object) -> None:
    """Append one line; it counts once it is whole."""
    line = json.dumps({**fields, "time": datetime.now(UTC).isoformat()})
    with (state / name).open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


service = tinker.ServiceClient()
if checkpoint:
    training = service.create_training_client_from_state_with_optimizer(checkpoint).result()
else:
    training = service.create_lora_training_client(args.base_model, rank=args.rank, seed=seed).result()
tokenizer = training.get_tokenizer()
tokens = tokenizer.encode(pathlib.Path(__file__).with_name("sonnets.txt").read_text())
held_back = args.batch * args.length + 1
text, unseen = tokens[:-held_back], tokens[-held_back:]


def datum(source: list[int], start: int) -> types.Datum:
    """One sequence of a text: predict each next token."""
    window = [source[(start + i) % len(source)] for i in range(args.length + 1)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(window[:-1]),
        loss_fn_inputs={"target_tokens": window[1:], "weights": [1.0] * args.length},
    )


def batch(source: list[int], first: int) -> list[types.Datum]:
    """So many sequences, one after the other."""
    return [datum(source, (first + i) * args.length) for i in range(args.batch)]


print(f"model {training.model_id} goes on after iteration {done}", flush=True)
for iteration in range(done + 1, args.iterations + 1):
    # What is learnt in an iteration depends on its number alone: a successor learns the same.
    forward_backward = training.forward_backward(batch(text, (iteration - 1) * args.batch), "cross_entropy")
    optim = training.optim_step(types.AdamParams(learning_rate=args.learning_rate))
    loss = forward_backward.result().metrics["loss:sum"] / (args.batch * args.length)
    optim.result()
    if iteration % args.evaluate_every == 0:
        unseen_loss = training.forward(batch(unseen, 0), "cross_entropy").result().metrics["loss:sum"]
        report("evaluation.jsonl", iteration=iteration, metrics={"loss": unseen_loss / (args.batch * args.length)})
    fields: dict[str, object] = {"iteration": iteration, "reward": -loss, "metrics": {"loss": loss}}
    if iteration % args.save_every == 0 or iteration == args.iterations:
        fields["checkpoint"] = training.save_state(f"iteration-{iteration}").result().path
    if iteration == args.iterations:
        fields["done"] = True  # the job is completed with this line
    report("progress.jsonl", **fields)
    print(f"iteration {iteration}/{args.iterations} loss {loss:.6f}", flush=True)
    time.sleep(args.pause)
service.close("success").result()
sys.stdout.flush()
# A thread of the SDK may be in compiled code at any time, and CPython before 3.14 may abort (exit code 134 or 139) when
# it ends such a thread (gh-87135). Everything is written: end without that.
os._exit(0)
