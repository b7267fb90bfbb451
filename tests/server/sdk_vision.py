"""Programs on images, run like `sdk_loop.py` with the interpreter that has the tinker SDK and nothing of ours."""

from __future__ import annotations

import random
import struct
import time
import zlib
from pathlib import Path

import tinker
from tinker import types

from tests.server.sdk_loop import run_scenario, say

BASE_MODEL = "everloop/tiny-vl"
START, END = 316, 317
SIZES = ((64, 64, 16), (48, 32, 6), (16, 16, 1), (50, 30, 6))
"""Width, height, and the tokens that the model makes of them."""


def png(width: int, height: int, rng: random.Random) -> bytes:
    """A picture of noise."""

    def block(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(rows)) + block(b"IEND", b"")


def seeing(rng: random.Random, images: int, words: int) -> types.ModelInput:
    """Images, each between its tokens and behind a few words, and words at the end."""

    def text(*before: int, count: int = 3) -> types.EncodedTextChunk:
        return types.EncodedTextChunk(tokens=[*before, *(rng.randrange(3, 300) for _ in range(count))])

    chunks: list[types.ModelInputChunk] = [text()]
    for _ in range(images):
        width, height, tokens = rng.choice(SIZES)
        chunks.append(types.EncodedTextChunk(tokens=[START]))
        chunks.append(types.ImageChunk(data=png(width, height, rng), format="png", expected_tokens=tokens))
        chunks.append(text(END))
    chunks.append(text(count=words))
    return types.ModelInput(chunks=chunks)


def batch(step: int, sequences: int) -> list[types.Datum]:
    """Sequences with none, one or two images that depend on `step` only; words are targets."""
    rng = random.Random(step)
    data = []
    for index in range(sequences):
        given = seeing(rng, index % 3, 20)
        length = given.length
        targets = [rng.randrange(3, 300) for _ in range(length)]
        weights = [0.0] * (length - 20) + [1.0] * 20
        inputs = {
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[length]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[length]),
        }
        data.append(types.Datum(model_input=given, loss_fn_inputs=inputs))
    return data


def train(seed: int, steps: int, sequences: int, samples: int, until: str = "") -> None:
    """A loop on images, a wrong image in the middle of it, then samples; these begin once the file `until` is there."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=seed).result()
    say(event="created", model_id=client.model_id)
    for step in range(steps):
        forward_backward = client.forward_backward(batch(step, sequences), "cross_entropy")
        optim = client.optim_step(types.AdamParams(learning_rate=1e-2))
        result = forward_backward.result()
        optim.result()
        say(event="step", step=step, loss=result.metrics["loss:sum"])
    wrong = batch(0, 2)
    chunks = wrong[1].model_input.chunks
    image = chunks[2]
    chunks[2] = types.ImageChunk(data=image.data[:-30], format="png", expected_tokens=image.expected_tokens)
    try:
        client.forward_backward(wrong, "cross_entropy").result()
    except tinker.RequestFailedError as error:
        say(event="refused", category=str(error.category), message=str(error))
    sampler = client.save_weights_and_get_sampling_client().result()
    say(event="sampling")
    while until and not Path(until).exists():
        time.sleep(0.01)
    rng = random.Random(seed)
    prompts = [seeing(rng, 1 + index % 2, 4) for index in range(samples)]
    params = [types.SamplingParams(max_tokens=60, seed=index, stop=[]) for index in range(samples)]
    futures = [sampler.sample(prompt, 4, each) for prompt, each in zip(prompts, params, strict=True)]
    for prompt, future in zip(prompts, futures, strict=True):
        sequences_ = future.result().sequences
        say(
            event="sampled",
            length=prompt.length,
            tokens=[list(each.tokens) for each in sequences_],
            logprobs=[list(each.logprobs or []) for each in sequences_],
        )
    say(event="scored", logprobs=sampler.compute_logprobs(prompts[0]).result())
    say(event="saved", path=client.save_state("final").result().path)
    service.close("success").result()
    say(event="done")


if __name__ == "__main__":
    run_scenario(train=train)
