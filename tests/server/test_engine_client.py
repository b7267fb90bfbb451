"""The client of the engine's socket against real engines, forked by the running pod's spare for these tests alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop_trainer.basefiles import files_sha256, remembered_files_sha256
from everloop_trainer.server import engine_client, frames
from everloop_trainer.server.engine_client import EngineClient, EngineLost, SpareSocket
from everloop_trainer.session.errors import EngineRefused
from everloop_trainer.session.operations import OptimStep, Sample
from everloop_trainer.session.ports import FrozenWeights, Lora
from everloop_trainer.tinker_proto import tinker_public
from tests.server import tinymodel
from tests.server.pod import Pod, alive, eventually, kill_process
from tests.server.wire import forward_backward_body, texts

LORA = Lora(rank=4, seed=3, train_mlp=True, train_attn=True, train_unembed=True)
STEP = OptimStep(0.01, 0.9, 0.95, 1e-12, 0.0, 0.0)


@pytest.fixture
def spare(pod: Pod, tiny_model: Path) -> SpareSocket:
    """Where the running pod's spare listens."""
    return SpareSocket(pod.directory / "run" / "spare.sock", tinymodel.NAME, files_sha256(tiny_model))


@pytest.fixture
async def engine(spare: SpareSocket) -> AsyncIterator[EngineClient]:
    """An engine of our own."""
    engine = await spare.connect()
    yield engine
    await engine.close()


async def test_a_written_state_comes_back(engine: EngineClient, spare: SpareSocket, tmp_path: Path) -> None:
    """Train, snapshot, write; a second engine restores the state and computes the same bits."""
    body = forward_backward_body("m", 1, texts(1, 2, 8))
    await engine.init("m", LORA)
    used = (await engine.forward_backward("m", 1, False, body)).usage
    assert (used.trained, used.scored) == (2 * 8, 0)
    assert used.forward > 0
    assert used.backward > 0
    stepped = await engine.optim_step("m", 2, STEP)
    assert "skipped_no_gradients" not in stepped.metrics
    assert stepped.usage.optimizer > 0
    snapshot = await engine.snapshot("m", 2, str(tmp_path / "snapshot"))
    written = await engine.write("m", 2, str(tmp_path / "written"), "all")
    assert (await snapshot).size == written.size == (tmp_path / "snapshot").stat().st_size
    loss = await engine.forward_backward("m", 3, True, body)
    assert (loss.usage.trained, loss.usage.scored, loss.usage.backward) == (0, 2 * 8, 0)
    other = await spare.connect()
    await other.restore("m", str(tmp_path / "written"), LORA, written.sha256, "all")
    assert (await other.forward_backward("m", 3, True, body)).body == loss.body
    await other.drop_gradients("m", 4)
    await other.drop("m")
    with pytest.raises(EngineRefused, match="not loaded"):
        await other.forward_backward("m", 5, True, body)
    await other.close()
    eventually(lambda: not alive(other.pid), "the engine ended with its connection", 5)


async def test_samples_from_stored_weights_and_from_the_base(engine: EngineClient, tmp_path: Path) -> None:
    """An answer has the asked number of sequences; weights are checked by hash."""
    await engine.init("m", LORA)
    written = await engine.write("m", 0, str(tmp_path / "w"), "weights")
    sample = Sample((5, 6), 2, 3, 1.0, 1.0, -1, (), 7, None)
    frozen = FrozenWeights(str(tmp_path / "w"), written.sha256, LORA)
    for weights in (None, frozen):
        sampled = await engine.sample(weights, sample, "key")
        assert len(tinker_public.SampleResponse.FromString(sampled.body).sequences) == 2
        assert (sampled.usage.prompt, sampled.usage.sampled) == (2, 2 * 3)
    with pytest.raises(EngineRefused) as refused:
        await engine.sample(FrozenWeights(frozen.path, "0" * 64, LORA), sample, "key")
    assert refused.value.category == "server"


async def test_bad_content_is_refused_and_the_engine_goes_on(engine: EngineClient) -> None:
    """An operation's refusal has the engine's words and category; the next operation works."""
    await engine.init("m", LORA)
    with pytest.raises(EngineRefused, match="target_tokens") as refused:
        await engine.forward_backward("m", 1, False, forward_backward_body("m", 1, [[5, 6, 100_000]]))
    assert refused.value.category == "user"
    await engine.forward_backward("m", 2, False, forward_backward_body("m", 2, texts(1, 1, 8)))


async def test_what_is_longer_than_a_message_never_reaches_the_engine(engine: EngineClient) -> None:
    """A request that the engine would take for a broken protocol is the user's error."""
    sample = Sample((5,), 1, 1, 1.0, 1.0, -1, "\u00e9" * (frames.MAX_HEADER_BYTES // 6 + 1), 7, None)
    with pytest.raises(EngineRefused, match="too large") as refused:
        await engine.sample(None, sample, "key")
    assert refused.value.category == "user"
    await engine.init("m", LORA)


async def test_a_killed_engine_fails_every_waiting_call(engine: EngineClient) -> None:
    """The running call, the queued one, `wait_lost` and any later call learn that the engine is gone."""
    await engine.init("m", LORA)
    body = forward_backward_body("m", 1, texts(1, 512, 200))
    calls = [asyncio.create_task(engine.forward_backward("m", seq, False, body)) for seq in (1, 2)]
    await asyncio.sleep(0)
    kill_process(engine.pid)
    for call in calls:
        with pytest.raises(EngineLost):
            await call
    await asyncio.wait_for(engine.wait_lost(), 1)
    with pytest.raises(EngineLost):
        await engine.drop("m")


async def test_a_frozen_engine_is_killed(spare: SpareSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped for good is lost like a killed one, even while a request waits to be taken."""
    monkeypatch.setattr(engine_client, "LISTEN_SECONDS", 0.1)
    monkeypatch.setattr(engine_client, "SILENT_CHECKS", 3)
    frozen = await spare.connect()
    os.kill(frozen.pid, signal.SIGSTOP)
    with pytest.raises(EngineLost):
        await asyncio.wait_for(frozen.forward_backward("m", 1, False, bytes(8 << 20)), 10)
    await asyncio.wait_for(frozen.wait_lost(), 1)
    eventually(lambda: not alive(frozen.pid), "the engine was killed", 5)
    await frozen.close()


async def test_an_engine_that_works_is_heard(engine: EngineClient) -> None:
    """An idle engine, too, says that it lives, well before it would be taken for frozen."""
    before = engine._received
    async with asyncio.timeout(engine_client.LISTEN_SECONDS * engine_client.SILENT_CHECKS / 4):
        while engine._received == before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


LISTENER = """
import os, socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1] + ".new")
s.listen()
os.rename(sys.argv[1] + ".new", sys.argv[1])  # whoever sees it can connect
time.sleep(60)
"""


async def test_a_frozen_spare_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes connections and never gives an engine is ended, so that the supervisor starts another."""
    monkeypatch.setattr(engine_client, "HELLO_SECONDS", 0.3)
    path = tmp_path / "spare.sock"
    with subprocess.Popen([sys.executable, "-c", LISTENER, str(path)]) as silent:
        try:
            spare = SpareSocket(path, tinymodel.NAME, "")
            eventually(path.exists, "the socket", 10)
            with pytest.raises(TimeoutError):
                await spare.connect()
            assert silent.wait(5) == -signal.SIGKILL
        finally:
            silent.kill()


async def test_a_snapshot_that_cannot_be_written_is_refused(engine: EngineClient, tmp_path: Path) -> None:
    """The promise of a snapshot fails with the engine's words, and the engine goes on."""
    await engine.init("m", LORA)
    (tmp_path / "file").touch()
    promise = await engine.snapshot("m", 0, str(tmp_path / "file" / "state"))
    with pytest.raises(EngineRefused):
        await promise
    await engine.drop("m")


@pytest.mark.parametrize(
    "last",
    [b"", b"\x05", frames.encode({"id": 1, "ok": True})[:-3], bytes(12), b"\xff" * 12],
    ids=["end", "torn lengths", "torn header", "no header", "absurd lengths"],
)
async def test_a_connection_that_ends_or_makes_no_sense_is_a_lost_engine(tmp_path: Path, last: bytes) -> None:
    """End of file between frames or inside one, and bytes that are no frame, fail the promise of a snapshot."""
    answered = asyncio.Event()

    async def scripted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode({"event": "hello", "pid": 1, "base_model": "b", "files_sha256": "f"}))
        header, _ = await frames.read(reader)
        writer.write(frames.encode({"id": header["id"], "ok": True}))
        await answered.wait()
        writer.write(last)
        writer.close()

    path = tmp_path / "s"
    async with await asyncio.start_unix_server(scripted, path):
        engine = await SpareSocket(path, "b", "f").connect()
        promise = await engine.snapshot("m", 1, "/x")
        answered.set()
        with pytest.raises(EngineLost):
            await promise
        await engine.wait_lost()
        await engine.close()


async def test_the_engine_is_told_of_a_sample_that_is_cancelled(tmp_path: Path) -> None:
    """Of that one alone; an answer that comes all the same is nobody's, and the next call has its own."""
    asked: asyncio.Queue[frames.Header] = asyncio.Queue()

    async def scripted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode({"event": "hello", "pid": 1, "base_model": "b", "files_sha256": "f"}))
        while True:
            header, _ = await frames.read(reader)
            asked.put_nowait(header)
            if header["op"] == "cancel":
                writer.write(frames.encode({"id": header["sample"], "ok": True}, b"too late"))
                writer.write(frames.encode({"id": header["id"], "ok": True}))
                break
        header, _ = await frames.read(reader)
        writer.write(frames.encode({"id": header["id"], "ok": True}, b"sampled"))
        await reader.read()
        writer.close()

    path = tmp_path / "s"
    async with await asyncio.start_unix_server(scripted, path):
        engine = await SpareSocket(path, "b", "f").connect()
        sample = Sample((5, 6), 1, 3, 1.0, 1.0, -1, (), 7, None)
        samples = [asyncio.create_task(engine.sample(None, sample, "key")) for _ in range(3)]
        numbers = [(await asked.get())["id"] for _ in samples]
        samples[1].cancel()
        told = await asyncio.wait_for(asked.get(), 10)
        assert (told["op"], told["sample"]) == ("cancel", numbers[1])
        assert (await engine.sample(None, sample, "key")).body == b"sampled"
        assert samples[1].cancelled()
        assert not samples[0].done()
        await engine.close()
        await asyncio.wait(samples)
        assert isinstance(samples[0].exception(), EngineLost)


async def test_no_spare_is_an_os_error(tmp_path: Path) -> None:
    """While there is no spare, connecting fails with what the session retries on."""
    with pytest.raises(OSError):
        await SpareSocket(tmp_path / "none.sock", tinymodel.NAME, "").connect()


async def test_a_spare_of_other_weights_is_refused(spare: SpareSocket) -> None:
    """The engine says which files it loaded; others than the server's are not taken."""
    with pytest.raises(ConnectionError, match="spare loaded"):
        await SpareSocket(spare.path, spare.base_model, "0" * 64).connect()


def test_hashes_of_files_are_remembered_until_they_change(tmp_path: Path) -> None:
    """The memory answers while names, sizes and times are the same, and notices a change."""
    model, memory = tmp_path / "model", tmp_path / "memory.json"
    model.mkdir()
    (model / "a").write_text("one")
    (model / ".hidden").write_text("book-keeping")
    first = remembered_files_sha256(model, memory)
    assert first == files_sha256(model)
    memory.write_text(memory.read_text().replace(first, "from memory"))
    assert remembered_files_sha256(model, memory) == "from memory"
    (model / "a").write_text("other")
    assert remembered_files_sha256(model, memory) == files_sha256(model) != first
    memory.write_text("{")
    assert remembered_files_sha256(model, memory) == files_sha256(model)
