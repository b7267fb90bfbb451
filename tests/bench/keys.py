"""From an API key's Secret in the API server to its effect at the gateway, and the same for its revocation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.bench.measure import Measure
from tests.bench.stack import serving

ROUNDS = 15
GOAL_SECONDS = 1.0
PATIENCE = 30.0


def run(place: Path) -> list[Measure]:
    """Raises TimeoutError if a key never works, or never stops working."""
    effects, revocations = [], []
    with serving(place) as stack:
        for _ in range(ROUNDS):
            key = stack.cluster.mint_key(stack.tenant.namespace)
            with stack.gateway.client(key.text) as client:
                effects.append(_seconds_until(client, key.apply, 200))
                revocations.append(_seconds_until(client, key.revoke, 401))
    return [
        Measure(f"a new key works, slowest of {ROUNDS}", max(effects), "s", GOAL_SECONDS, samples=tuple(effects)),
        Measure(
            f"a revoked key is refused, slowest of {ROUNDS}",
            max(revocations),
            "s",
            GOAL_SECONDS,
            samples=tuple(revocations),
        ),
    ]


def _seconds_until(client: httpx.Client, change: Callable[[], None], wanted: int) -> float:
    """From before the change is sent to the API server until an answer shows it: neither is left out."""
    began = time.perf_counter()
    change()
    while True:
        status = client.post("/client/config").status_code
        elapsed = time.perf_counter() - began
        if status == wanted:
            return elapsed
        if elapsed > PATIENCE:
            raise TimeoutError(f"no {wanted} within {PATIENCE:.0f} s, but {status}")
