"""A plain client of an engine's socket, and the requests that tests send over it."""

from __future__ import annotations

import itertools
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from everloop_trainer.engine import framing
from everloop_trainer.tinker_proto import tinker_public

ADAM: dict[str, Any] = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
LORA: dict[str, Any] = {"rank": 4, "seed": 11, "train_mlp": True, "train_attn": True, "train_unembed": True}
SAMPLE: dict[str, Any] = {
    "num_samples": 1,
    "max_tokens": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "seed": 3,
    "stop": None,
    "weights": None,
    "key": "key",
    "prompt_logprobs": False,
    "prompt_logprobs_last_n": None,
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
}


class Refused(Exception):
    """An answer with ok false."""

    def __init__(self, error: str, category: str) -> None:
        super().__init__(error)
        self.category = category


class Engine:
    """One connection to a spare, and so one engine process."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(120)
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        try:
            self.socket.connect(str(path))
            self.hello, _ = framing.receive(self.socket)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    @property
    def pid(self) -> int:
        return int(self.hello["pid"])

    def send(self, op: str, body: bytes = b"", **fields: Any) -> int:
        number = next(self._ids)
        framing.send(self.socket, {"id": number, "op": op, **fields}, body)
        return number

    def answer(self, number: int) -> tuple[dict[str, Any], bytes]:
        """The answer to request `number`; events that come before it are kept."""
        while True:
            header, body = framing.receive(self.socket)
            if "event" in header:
                if header["event"] != "alive":
                    self.events.append(header)
                continue
            assert header["id"] == number
            if not header["ok"]:
                raise Refused(header["error"], header["category"])
            return header, body

    def call(self, op: str, body: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        return self.answer(self.send(op, body, **fields))

    def event(self) -> dict[str, Any]:
        """The next event that is more than a sign of life."""
        while not self.events:
            header, _ = framing.receive(self.socket)
            assert "event" in header
            if header["event"] != "alive":
                return header
        return self.events.pop(0)

    def step(self, model: str, seq: int, body: bytes, **adam: float) -> tuple[bytes, dict[str, float]]:
        """forward_backward number `seq` and optim_step `seq + 1`; returns the output and the metrics."""
        _, output = self.call("forward_backward", body, model=model, seq=seq, forward_only=False)
        header, _ = self.call("optim_step", model=model, seq=seq + 1, **{**ADAM, **adam})
        return output, header["metrics"]

    def saved(self, model: str, path: Path, seq: int = 0, parts: str = "all") -> bytes:
        """Write the state to `path` and return the bytes of the file."""
        self.call("write", model=model, seq=seq, path=str(path), parts=parts)
        return path.read_bytes()


def datum(tokens: Sequence[int], targets: Sequence[int] | None = None, weights: Sequence[float] | None = None) -> Any:
    """A Datum as the SDK sends it; by default each token's target is its successor, with weight 1."""
    targets = [*tokens[1:], tokens[0]] if targets is None else targets
    weights = [1.0] * len(targets) if weights is None else weights
    message = tinker_public.Datum()
    message.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    put(message, "target_tokens", np.asarray(targets, np.int64))
    put(message, "weights", np.asarray(weights, np.float32))
    return message


def put(message: Any, name: str, values: Any) -> None:
    """Set a dense input of a Datum."""
    dtypes = {"float32": tinker_public.DTYPE_FLOAT32, "int64": tinker_public.DTYPE_INT64}
    tensor = tinker_public.Tensor(dense=values.tobytes(), dtype=dtypes[str(values.dtype)], shape=values.shape)
    message.loss_fn_inputs[name].CopyFrom(tensor)


def request(*data: Any, loss_fn: str = "cross_entropy") -> bytes:
    """A serialised ForwardBackwardRequest."""
    return bytes(tinker_public.ForwardBackwardRequest(data=data, loss_fn=loss_fn).SerializeToString())


def output_of(body: bytes) -> tuple[float, list[Any]]:
    """Loss and per-datum logprobs of a ForwardBackwardOutput."""
    message = tinker_public.ForwardBackwardOutput.FromString(body)
    (record,) = message.loss_fn_outputs
    batched = record.fields["logprobs"]
    values = np.frombuffer(batched.data, np.float32)
    offsets = np.frombuffer(batched.offsets, np.int64) // 4
    assert record.num_datums == len(offsets) - 1
    return message.metrics["loss:sum"], [values[start:stop] for start, stop in itertools.pairwise(offsets)]


def connect(path: Path, process: subprocess.Popen[bytes], seconds: float = 120) -> Engine:
    """Connect as soon as the spare listens; fail at once if it ends."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return Engine(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
