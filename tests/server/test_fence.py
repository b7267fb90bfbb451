"""A server whose storage was claimed by another pod answers nothing but that, whatever it is asked, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from everloop_trainer.server.app import build_app
from everloop_trainer.server.gate import MISDIRECTED, POD_UID_HEADER, Closed, Gate
from everloop_trainer.session.errors import Fenced, StorageFailed
from everloop_trainer.store.epochs import claim
from tests.session.world import TIME, A, Client, Running, create, fb, optim, running, save, until
from tests.store.crash_files import CrashFiles, Disk

UNAWARE = 1e6
PATH = f"tinker://{A}/weights/first"
HEADERS = {"Authorization": "Bearer token", POD_UID_HEADER: "pod-1", "x-everloop-weights": PATH}
COPY = {"session_id": "s-9", "model_seq_id": 0}
ASKED: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "a result": ("POST", "retrieve_future", {"request_id": f"{A}:2"}),
    "a future": ("POST", "retrieve_future", {"request_id": f"{A}:9"}),
    "an operation": ("POST", "optim_step", {"model_id": A, "seq_id": 4, "adam_params": {"learning_rate": 1e-3}}),
    "a repeat": ("POST", "optim_step", {"model_id": A, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}),
    "a model": ("POST", "get_info", {"model_id": A}),
    "no model": ("POST", "get_info", {"model_id": "s-0:train:7"}),
    "a checkpoint": ("POST", "weights_info", {"tinker_path": PATH}),
    "no checkpoint": ("POST", "weights_info", {"tinker_path": f"{PATH}-2"}),
    "runs": ("GET", "training_runs", None),
    "a run": ("GET", f"training_runs/{A}", None),
    "its checkpoints": ("GET", f"training_runs/{A}/checkpoints", None),
    "all checkpoints": ("GET", "checkpoints", None),
    "no files": ("GET", f"training_runs/{A}/checkpoints/external_weights/none/files", None),
    "sessions": ("GET", "sessions", None),
    "a removal": ("DELETE", f"training_runs/{A}/checkpoints/weights/first", None),
    "no removal": ("DELETE", f"training_runs/{A}/checkpoints/weights/none", None),
    "a publication": ("POST", f"training_runs/{A}/checkpoints/weights/first/publish", None),
    "a copy": ("POST", "copy_weights", {"source_path": PATH, **COPY}),
    "no copy": ("POST", "copy_weights", {"source_path": f"{PATH}-2", **COPY}),
    "an expiry": ("PUT", f"training_runs/{A}/checkpoints/weights/first/ttl", {"ttl_seconds": 3600}),
}


NOTHING = {"a future", "no model", "no checkpoint", "no files", "no removal", "no copy"}


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Running, Gate, httpx.AsyncClient]]:
    """A session with a model and a checkpoint behind its gate, of pod-1."""
    async with running(Disk(), fence_interval=UNAWARE) as world:
        await Client().play(world.service, [[create(A)], [fb(A, 1), optim(A, 2), save(A, 3, "first")]])
        gate = Gate("token", "pod-1")
        gate.open(world.service)
        transport = httpx.ASGITransport(app=build_app(gate))
        async with httpx.AsyncClient(transport=transport, base_url="http://pod/api/v1", headers=HEADERS) as client:
            yield world, gate, client


@pytest.mark.parametrize("what", sorted(ASKED))
async def test_a_zombie_answers_nothing(what: str) -> None:
    """Neither what it knows nor that it knows nothing: the pod that took over may know better."""
    method, name, body = ASKED[what]
    async with serving() as (world, gate, client):
        claim(CrashFiles(world.files.disk), 2, "pod-2", TIME)
        answer = await client.request(method, name, json=body)
        assert answer.status_code == MISDIRECTED, answer.text
        assert isinstance(gate.ended.result(), Fenced)


@pytest.mark.parametrize("what", sorted(set(ASKED) - NOTHING))
async def test_the_owner_answers(what: str) -> None:
    """The same questions are answered by who owns the storage."""
    method, name, body = ASKED[what]
    async with serving() as (_, _, client):
        answer = await client.request(method, name, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("reason", "code"), [(Fenced("over"), MISDIRECTED), (StorageFailed("over"), 503)])
async def test_who_has_ended_judges_no_content(reason: Fenced | StorageFailed, code: int) -> None:
    """A call that this server could not read may be in order for its successor: no 400."""
    async with serving() as (_, gate, client):
        gate.end(reason)
        assert (await client.post("optim_step", content=b"{")).status_code == code


async def test_a_call_that_began_before_the_end_is_not_taken_in() -> None:
    """Its body arrives only after the server had ended."""
    async with serving() as (world, gate, client):

        async def body() -> AsyncIterator[bytes]:
            yield b'{"model_id": "%s", "seq_id": 4, ' % A.encode()
            gate.end(Fenced("over"))
            yield b'"adam_params": {"learning_rate": 0.001}}'

        answer = await client.post("optim_step", content=body(), headers={"Content-Type": "application/json"})
        assert answer.status_code == MISDIRECTED
        assert world.service._context.history.entry(f"{A}:4") is None


async def test_who_ended_before_it_opened_tells_no_state() -> None:
    """Nobody takes it for one that is still opening."""
    gate = Gate("token", "pod-1")
    assert gate.status()["state"] == "Opening"
    gate.end(StorageFailed("over"))
    with pytest.raises(Closed):
        gate.status()


async def test_an_open_poll_ends_with_the_server() -> None:
    """Whoever waits for an operation is sent to the pod that took over, at once."""
    async with serving() as (world, gate, client):
        world.engine.gate = asyncio.Event()
        await world.service.accept(optim(A, 4))
        poll = asyncio.create_task(client.post("retrieve_future", json={"request_id": f"{A}:4"}))
        await until(lambda: f"{A}:4" in world.service._waiting)
        gate.end(Fenced("over"))
        answer = await asyncio.wait_for(poll, 10)
        assert answer.status_code == MISDIRECTED


async def test_a_call_for_another_pod_is_not_answered() -> None:
    """An address may have passed to this pod since the call was sent."""
    async with serving() as (_, _, client):
        answer = await client.get("training_runs", headers={POD_UID_HEADER: "pod-0"})
        assert answer.status_code == MISDIRECTED
