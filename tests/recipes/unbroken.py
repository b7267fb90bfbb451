"""The same submits once more, to a pod that nobody kills: what a recipe's run would have been without the kills."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.recipes.recorder import Call
from tests.server.pod import Pod

PASSED = frozenset({"content-type", "content-encoding", "x-everloop-weights"})
"""Headers of the gateway's that say what the body means."""
POLL_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of one operation, by the journal: its answer (bytes, or why none), and the file that it left."""

    ok: bool
    answer: str
    stored: str | None


Name = tuple[str, int]
"""Stream and number of an operation."""


def outcomes(journal: list[dict[str, Any]]) -> dict[Name, Outcome]:
    """Of each operation; one that has two is an AssertionError."""
    found: dict[Name, Outcome] = {}
    for record in journal:
        if record["t"] == "result":
            name = record["s"], record["n"]
            stored = record["stored"]["sha256"] if "stored" in record else None
            assert name not in found, f"{name} has two results"
            answer = record["body"]["sha256"] if "body" in record else record["error"]
            found[name] = Outcome(record["ok"], answer, stored)
    return found


def seeds(journal: list[dict[str, Any]]) -> dict[Name, int]:
    """What was drawn for operations that came without a seed, or what they came with."""
    accepted = [record for record in journal if record["t"] == "accept" and "seed" in record["a"]]
    return {(record["s"], record["n"]): record["a"]["seed"] for record in accepted}


def repeat(calls: list[Call], drawn: dict[Name, int], pod: Pod) -> dict[Name, Outcome]:
    """Send `calls` in their order and wait for all results; returns their outcomes."""
    with httpx.Client(base_url=pod.url, headers=pod.headers, timeout=POLL_SECONDS) as client:
        for call in calls:
            headers = {name: value for name, value in call.headers.items() if name in PASSED}
            answer = client.post(f"/api/v1/{call.name}", content=_with_seed(call, drawn), headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["request_id"] == call.request_id
            if call.name.startswith("save_weights"):  # what follows may ask for what it leaves
                _wait(client, call.request_id)
        for call in calls:
            _wait(client, call.request_id)
    asked = {call.request_id for call in calls}
    return {name: each for name, each in outcomes(pod.journal()).items() if f"{name[0]}:{name[1]}" in asked}


def _wait(client: httpx.Client, request_id: str) -> None:
    while True:
        answer = client.post("/api/v1/retrieve_future", json={"request_id": request_id, "allow_metadata_only": True})
        if answer.status_code != 408 and b"try_again" not in answer.content:
            assert answer.status_code == 200, answer.text
            return


def _with_seed(call: Call, drawn: dict[Name, int]) -> bytes:
    stream, _, number = call.request_id.rpartition(":")
    seed = drawn.get((stream, int(number)))
    if call.name == "create_model":
        body = json.loads(call.body)
        return json.dumps(body | {"lora_config": body["lora_config"] | {"seed": seed}}).encode()
    if call.name == "asample":
        body = json.loads(call.body)
        return json.dumps(body | {"sampling_params": body["sampling_params"] | {"seed": seed}}).encode()
    return call.body
