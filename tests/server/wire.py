"""The tinker wire protocol spoken with plain httpx, for what the SDK never does."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import httpx
import numpy as np

from everloop_trainer.tinker_proto import tinker_public
from tests.server import tinymodel
from tests.server.pod import Pod

_sessions = itertools.count(1)


def new_session() -> str:
    """A session id as the gateway makes them."""
    return f"s-{time.time_ns():016x}-{next(_sessions):016x}"


def forward_backward_body(model_id: str, seq: int, datums: list[list[int]], forward_only: bool = False) -> bytes:
    """A cross_entropy request over texts of token ids, every token predicted with weight 1."""
    request = tinker_public.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq, loss_fn="cross_entropy", forward_only=forward_only
    )
    for tokens in datums:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
        length = len(tokens) - 1
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = tinker_public.DTYPE_INT64, np.array(tokens[1:], "<i8").tobytes()
        targets.shape.append(length)
        weights = datum.loss_fn_inputs["weights"]
        weights.dtype, weights.dense = tinker_public.DTYPE_FLOAT32, np.ones(length, "<f4").tobytes()
        weights.shape.append(length)
    body: bytes = request.SerializeToString()
    return body


def texts(seed: int, count: int, length: int) -> list[list[int]]:
    """Random texts of `length` + 1 tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 300) for _ in range(length + 1)] for _ in range(count)]


class Wire:
    """One client of a pod, speaking as the gateway would."""

    def __init__(self, pod: Pod) -> None:
        self.client = httpx.Client(base_url=pod.url, headers=pod.headers, timeout=60)
        self.session = new_session()
        self.model = f"{self.session}:train:0"

    def post(self, name: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(f"/api/v1/{name}", json=body, **options)

    def post_protobuf(self, body: bytes, **headers: str) -> httpx.Response:
        return self.client.post(
            "/api/v1/forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"} | headers
        )

    def retrieve(self, request_id: str) -> httpx.Response:
        return self.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})

    def create_model(self, **lora: Any) -> httpx.Response:
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": tinymodel.NAME}
        return self.post("create_model", body | {"lora_config": {"rank": 4, "seed": 1} | lora})

    def created(self) -> Wire:
        """This client, with its model created."""
        answer = self.retrieve(self.create_model().json()["request_id"])
        assert answer.json() == {"model_id": self.model, "type": "create_model"}
        return self

    def forward_backward(self, seq: int, datums: list[list[int]]) -> httpx.Response:
        return self.post_protobuf(forward_backward_body(self.model, seq, datums))

    def optim_step(self, seq: int, learning_rate: float = 1e-2) -> httpx.Response:
        return self.post(
            "optim_step", {"model_id": self.model, "seq_id": seq, "adam_params": {"learning_rate": learning_rate}}
        )
