"""The real model: an engine killed in the middle of a step costs nothing, and the arithmetic holds at full size."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.client import LORA, SAMPLE, Engine, datum, output_of, request
from tests.engine.processes import cpu_seconds, wait_until

pytestmark = pytest.mark.slow

LARGE = {**LORA, "rank": 32}


def _bodies(count: int) -> list[bytes]:
    generator = np.random.default_rng(3)
    return [request(*(datum(generator.integers(0, 49152, 64).tolist()) for _ in range(4))) for _ in range(count)]


def test_killed_in_the_middle_of_a_step(real_spare: Path, tmp_path: Path) -> None:
    """SIGKILL during forward_backward; snapshot and replay in a new process end in the bits of the unbroken run."""
    bodies = _bodies(3)
    with Engine(real_spare) as engine:
        engine.call("init", model="m", **LARGE)
        fresh = engine.saved("m", tmp_path / "fresh", parts="weights")
        expected = [engine.step("m", 2 * index + 1, body) for index, body in enumerate(bodies)]
        unbroken = engine.saved("m", tmp_path / "unbroken", seq=6)
        assert engine.saved("m", tmp_path / "trained", parts="weights") != fresh

    path = tmp_path / "snapshot"
    with Engine(real_spare) as engine:
        engine.call("init", model="m", **LARGE)
        assert engine.step("m", 1, bodies[0]) == expected[0]
        engine.call("snapshot", model="m", seq=2, path=str(path))
        event = engine.event()
        assert event["event"] == "written"
        engine.step("m", 3, bodies[1])
        busy = cpu_seconds(engine.pid)
        number = engine.send("forward_backward", bodies[2], model="m", seq=5, forward_only=False)
        wait_until(lambda: cpu_seconds(engine.pid) > busy + 0.3)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EOFError):
            engine.answer(number)

    with Engine(real_spare) as engine:
        restore = {"path": str(path), "lora": LARGE, "sha256": event["sha256"], "parts": "all"}
        engine.call("restore", model="m", **restore)
        assert engine.step("m", 3, bodies[1]) == expected[1]
        assert engine.step("m", 5, bodies[2]) == expected[2]
        assert engine.saved("m", tmp_path / "recovered", seq=6) == unbroken


def test_loss_and_samples_are_those_of_the_plain_model(real_spare: Path, real_model: Path) -> None:
    """A fresh adapter has the losses of SmolLM2, and a greedy answer is the one that transformers generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = prompt["input_ids"][0].tolist()
    with torch.no_grad():
        scores = torch.log_softmax(model(**prompt).logits[0], -1)
        generated = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, len(tokens) :]
    expected = scores[torch.arange(len(tokens) - 1), prompt["input_ids"][0, 1:]]
    with Engine(real_spare) as engine:
        engine.call("init", model="m", **LARGE)
        body = request(datum(tokens[:-1], tokens[1:]))
        _, output = engine.call("forward_backward", body, model="m", seq=1, forward_only=True)
        loss, (logprobs,) = output_of(output)
        np.testing.assert_allclose(logprobs, expected.numpy(), rtol=1e-4, atol=2e-4)
        assert loss == pytest.approx(-expected.sum().item(), rel=1e-4)
        sample = {**SAMPLE, "prompt": tokens, "temperature": 0.0, "max_tokens": 16}
        answer = engine.call("sample", **sample)[1]
    from everloop_trainer.tinker_proto import tinker_public

    (sequence,) = tinker_public.SampleResponse.FromString(answer).sequences
    assert np.frombuffer(sequence.tokens, np.int32).tolist() == generated.tolist()
    assert sequence.stop_reason == tinker_public.STOP_REASON_STOP
    assert "Paris" in tokenizer.decode(generated)
    assert tokenizer.decode(generated).endswith("<|im_end|>")
