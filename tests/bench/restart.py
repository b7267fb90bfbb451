"""How long a server takes to open a session with a long history, from the start of its process until it serves.

The history is made by the session itself with a real engine of a small model: operations without gradients, one after
another, on storage in memory, since 100,000 pairs of flushes would only take time. The server is then killed in the
midst, as no orderly end may be needed, and a new one opens what is there.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from everloop_trainer.config import read_config
from everloop_trainer.session.operations import CreateModel, Operation, OptimStep
from everloop_trainer.session.outcomes import Succeeded
from everloop_trainer.session.service import SessionService
from everloop_trainer.wiring import open_session
from tests.bench.measure import Measure
from tests.bench.stack import make_pod
from tests.server import tinymodel
from tests.server.pod import Pod, eventually, kill_process

OPERATIONS = 100_000
IN_MEMORY = Path("/dev/shm")
MODEL = "s-0123456789abcdef-0123456789abcdef:train:0"
STEP = OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
GOAL_SECONDS = 10.0
"""What "in seconds" is taken to mean."""
PATIENCE = 600.0


def run(place: Path) -> list[Measure]:
    """Raises ValueError if the new server does not know every operation."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    tinymodel.write_tiny_model(place / "tiny")
    memory = Path(tempfile.mkdtemp(prefix="everloop-bench-", dir=IN_MEMORY))
    pod = make_pod(place / "pod", tinymodel.NAME, place / "tiny", "5e" * 32, tinymodel.MAX_LENGTH)
    pod.root = memory / "session"
    pod.configure(storage={"root": str(pod.root)})
    try:
        seconds = asyncio.run(_fill(pod))
        size = sum(path.stat().st_size for path in pod.root.rglob("*") if path.is_file())
        opened = _open(pod)
    finally:
        pod.end()
        shutil.rmtree(memory)
    what = f"{OPERATIONS:,} operations"
    return [
        Measure(f"server started until it serves a session of {what}", opened, "s", GOAL_SECONDS),
        Measure(f"storage of {what}", size / 2**20, "MiB"),
        Measure("operations that made it, on storage in memory", OPERATIONS / seconds, "operations/s"),
    ]


async def _fill(pod: Pod) -> float:
    """Run the operations; returns seconds. The spare is a process; the session lives here and is dropped at the end."""
    pod.start("spare")
    service = await open_session(read_config(pod.environment), lambda _journal: None)
    running = asyncio.create_task(service.run())
    create = CreateModel(tinymodel.NAME, 4, 1, train_mlp=True, train_attn=True, train_unembed=True)
    try:
        await _done(service, Operation(MODEL, 0, create))
        began = time.perf_counter()
        for seq in range(1, OPERATIONS + 1):
            await _done(service, Operation(MODEL, seq, STEP))
        return time.perf_counter() - began
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        pod.end()


async def _done(service: SessionService, operation: Operation) -> None:
    await service.accept(operation)
    outcome = await service.outcome(operation.request_id, PATIENCE)
    if not isinstance(outcome, Succeeded):
        raise ValueError(f"{operation.request_id} ended as {outcome}")


def _open(pod: Pod) -> float:
    """Start the pod, and see how long its second server takes once the spare is there."""
    pod.start()
    pod.wait_until("Serving", PATIENCE)
    old = pod.child("server")
    assert old is not None
    kill_process(old)
    began = time.perf_counter()
    eventually(lambda: pod.child("server") not in (None, old), "another server", PATIENCE)
    status = eventually(lambda: _serving(pod), "the session to serve", PATIENCE)
    if [model["seq"] for model in status["models"]] != [OPERATIONS]:
        raise ValueError(f"the new server knows {status['models']}")
    return time.perf_counter() - began


def _serving(pod: Pod) -> dict[str, Any] | None:
    status = pod.status()
    return status if status is not None and status["state"] == "Serving" else None
