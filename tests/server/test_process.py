"""The server's process from within: what ends it, and how it listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from everloop_trainer.server import process
from everloop_trainer.session.errors import StorageFailed
from everloop_trainer.session.ports import Journal
from everloop_trainer.session.service import SessionConfig, SessionService
from everloop_trainer.store import space
from everloop_trainer.store.opening import open_store
from tests.networks import new_address
from tests.session.fake_engine import FakeSource
from tests.session.world import BASE, TIME, claimant
from tests.store.crash_files import CrashFiles, Disk


async def test_a_server_that_nobody_can_reach_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """When listening ends by itself, the session is drained and the process fails, so that it is started again."""
    files = CrashFiles(Disk())
    store = await open_store(files, claimant(), TIME)
    config = SessionConfig(store.incarnation, store.previous, store.lineage, BASE, 1, 8, 1.0)
    serving = asyncio.Event()

    async def broken(_server: process._HttpServer, sockets: list[socket.socket]) -> None:
        await serving.wait()
        for each in sockets:
            each.close()
        raise RuntimeError("the listener broke")

    async def open_session(_begun: object) -> SessionService:
        serving.set()
        return SessionService(
            config, store.journal, store.states, FakeSource(files), store.base, store.history, store.compactor
        )

    monkeypatch.setattr(process._HttpServer, "serve", broken)
    server = asyncio.create_task(process.serve(new_address(), 8080, "token", "pod-1", open_session))
    ended, _ = await asyncio.wait({server}, timeout=10)
    assert ended
    with pytest.raises(RuntimeError, match="the listener broke"):
        server.result()
    await store.journal.close()


async def test_no_answer_waits_for_the_peer_to_acknowledge_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to the pod have Nagle's algorithm off: with it each answer may take 40 ms longer."""
    options: list[int] = []

    async def accept_one(_server: process._HttpServer, sockets: list[socket.socket]) -> None:
        (listener,) = sockets
        with listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def open_session(_begun: object) -> SessionService:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")

    monkeypatch.setattr(process._HttpServer, "serve", accept_one)
    await asyncio.wait_for(process.serve(new_address(), 8080, "token", "pod-1", open_session), 10)
    assert options == [1]


async def test_a_server_that_waits_for_space_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first record finds the storage full: until there is space the status tells, and then it ends."""
    monkeypatch.setattr(space, "RESERVE", 1024)
    files, ip = CrashFiles(Disk(), full_at=5), new_address()

    async def open_session(begun: Callable[[Journal], None]) -> SessionService:
        await open_store(files, claimant(), TIME, probe_interval=0.01, begun=begun)
        raise AssertionError("it opened on full storage")

    server = asyncio.create_task(process.serve(ip, 8080, "token", "pod-1", open_session))
    async with asyncio.timeout(30), httpx.AsyncClient(headers={"Authorization": "Bearer token"}) as client:
        told: dict[str, Any] = {}
        while "No space left" not in told.get("storage", {}).get("error", ""):
            await asyncio.sleep(0.01)
            told = (await client.get(f"http://{ip}:8080/status")).json()
        assert told["state"] == "Opening"
        assert (await client.get(f"http://{ip}:8080/readyz")).status_code == 503
        files.full_at = files.refuse = None
        with pytest.raises(StorageFailed, match="No space left"):
            await server
