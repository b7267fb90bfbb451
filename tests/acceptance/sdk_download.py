"""A user's programs that train an adapter and fetch it, with the unmodified SDK and cookbook; run by test_downloads.py.

sdk_download.py train BASE_MODEL          prints the tinker path of a training checkpoint
sdk_download.py download PATH DIRECTORY   by the cookbook's `weights.download`
"""

from __future__ import annotations

import os
import sys

import tinker


def train(base_model: str) -> None:
    """One step on one text."""
    client = tinker.ServiceClient().create_lora_training_client(base_model, rank=64, seed=1)
    tokens = list(range(100, 140))
    targets = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=targets)
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result()
    print(client.save_state("trained").result().path, flush=True)


def download(path: str, directory: str) -> None:
    """Decrypted, as the cookbook does it."""
    from tinker_cookbook import weights

    print(weights.download(tinker_path=path, output_dir=directory), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2])
    else:
        download(*sys.argv[2:])
    # CPython before 3.14 aborts at its end if a thread of the SDK is in compiled code then (gh-87135).
    os._exit(0)
