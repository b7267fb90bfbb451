"""An operation without data as raw HTTP: sent, journaled, run, journaled again, fetched. Two calls of the wire.

The same is measured at the pod's own door, in turns: the difference is what the gateway costs.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.bench.measure import Measure, of_samples, percentile
from tests.bench.stack import Stack, serving

WARM_UP, ROUNDS = 50, 500
GOAL_MS = 5.0


class Wire:
    """One connection, and what is said on it: as little on this side as the standard library allows."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        self._headers = {"Content-Type": "application/json", **headers}

    def post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError for any status but 200."""
        self._connection.request("POST", f"/api/v1/{name}", json.dumps(body), self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{name}: HTTP {answer.status}: {content[:500]!r}")
        value: dict[str, Any] = json.loads(content)
        return value

    def optim_step(self, model: str, seq: int) -> dict[str, Any]:
        """Send one; the answer names what to fetch."""
        return self.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-4}})

    def finish(self, accepted: dict[str, Any]) -> dict[str, Any]:
        """Fetch the result of what was accepted."""
        return self.post("retrieve_future", {"request_id": accepted["request_id"], "allow_metadata_only": True})

    def close(self) -> None:
        """Let the connection go."""
        self._connection.close()


def run(place: Path) -> list[Measure]:
    """Raises RuntimeError if an operation does not end as it should."""
    with serving(place) as stack:
        gateway, pod = Wire(stack.gateway.url, {"X-API-Key": stack.key}), Wire(stack.pod.url, stack.pod.headers)
        model = new_model(stack, gateway)
        taken: dict[Wire, list[tuple[float, float]]] = {gateway: [], pod: []}
        for number in range(WARM_UP + ROUNDS):
            for wire in (gateway, pod) if number % 2 else (pod, gateway):
                seq = 1 + sum(map(len, taken.values()))
                taken[wire].append(_round(wire, model, seq))
        gateway.close()
        pod.close()
    through, direct = taken[gateway][WARM_UP:], taken[pod][WARM_UP:]
    whole = [both for _, both in through]
    return [
        of_samples("optim_step without gradients through the gateway, sent to fetched, p50", whole, "ms", GOAL_MS),
        Measure("the same, p95", percentile(whole, 0.95), "ms"),
        of_samples("of which until it is acknowledged, p50", [first for first, _ in through], "ms"),
        of_samples("the same at the pod's own door, p50", [both for _, both in direct], "ms"),
    ]


def new_model(stack: Stack, wire: Wire) -> str:
    """A model through the gateway, which binds it; returns its id."""
    session = wire.post("create_session", {})["session_id"]
    lora = {"rank": 8, "seed": 1}
    body = {"session_id": session, "model_seq_id": 0, "base_model": stack.base_model, "lora_config": lora}
    model: str = wire.finish(wire.post("create_model", body))["model_id"]
    return model


def _round(wire: Wire, model: str, seq: int) -> tuple[float, float]:
    """Milliseconds until the operation is acknowledged, and until its result is here."""
    began = time.perf_counter()
    accepted = wire.optim_step(model, seq)
    acknowledged = time.perf_counter()
    result = wire.finish(accepted)
    ended = time.perf_counter()
    if result.get("metrics") != {"skipped_no_gradients": 1.0}:
        raise RuntimeError(f"optim_step {seq} ended as {result}")
    return (acknowledged - began) * 1e3, (ended - began) * 1e3
