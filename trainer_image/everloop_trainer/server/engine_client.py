"""The server's end of an engine: requests over the unix socket of the spare, one engine per connection.

End of file means that the engine is gone: every waiting call then raises `EngineLost`. So does silence: an engine says
every few seconds that it lives, and one that stopped doing so is killed, as nobody else would.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import structlog

from everloop_trainer.server import frames
from everloop_trainer.session.errors import Category, EngineRefused
from everloop_trainer.session.operations import OptimStep, Sample
from everloop_trainer.session.ports import (
    About,
    Computed,
    FrozenWeights,
    Lora,
    Parts,
    Room,
    Stepped,
    Usage,
    Written,
)

HELLO_SECONDS = 60.0
"""How long a freshly forked engine may take to say what it is."""
LISTEN_SECONDS = 2.0
SILENT_CHECKS = 30
"""An engine is frozen if nothing was heard of it in so many checks, one after another. Checks are counted instead of
seconds: while this process is stopped itself, nobody is listening."""

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_log = structlog.get_logger(__name__)


class EngineLost(ConnectionError):
    """The engine process is gone."""


class EngineClient:
    """One engine process; implements `session.ports.Engine`. Made by `SpareSocket.connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: frames.Header) -> None:
        self._reader = reader
        self._writer = writer
        self._pid = int(hello["pid"])
        self._ids = itertools.count(1)
        self._turn = asyncio.Lock()
        self._lost = asyncio.Event()
        self._answers: dict[int, asyncio.Future[tuple[frames.Header, bytes]]] = {}
        self._snapshots: dict[str, asyncio.Future[Written]] = {}
        self._received = 0
        self._receiver = asyncio.create_task(self._receive(), name=f"engine-{self._pid}")
        self._listener = asyncio.create_task(self._listen(), name=f"engine-{self._pid}-listener")

    @property
    def pid(self) -> int:
        """Process id, as the engine sees itself."""
        return self._pid

    async def room(self, lora: Lora) -> Room:
        """See `session.ports.Engine`."""
        header, _ = await self._request("room", **dataclasses.asdict(lora))
        return Room(
            parameters=int(header["parameters"]),
            needed=int(header["needed"]),
            free=int(header["free"]),
            total=int(header["total"]),
            of=str(header["of"]),
        )

    async def init(self, model: str, lora: Lora) -> None:
        """See `session.ports.Engine`."""
        await self._request("init", model=model, **dataclasses.asdict(lora))

    async def restore(self, model: str, path: str, lora: Lora, sha256: str, parts: Parts) -> None:
        """See `session.ports.Engine`."""
        await self._request(
            "restore", model=model, path=path, lora=dataclasses.asdict(lora), sha256=sha256, parts=parts
        )

    async def load(self, model: str, path: str, lora: Lora, sha256: str, optimizer: bool) -> None:
        """See `session.ports.Engine`."""
        await self._request(
            "load", model=model, path=path, lora=dataclasses.asdict(lora), sha256=sha256, optimizer=optimizer
        )

    async def drop(self, model: str) -> None:
        """See `session.ports.Engine`."""
        await self._request("drop", model=model)

    async def forward_backward(self, model: str, seq: int, forward_only: bool, body: bytes) -> Computed:
        """See `session.ports.Engine`."""
        header, output = await self._request("forward_backward", body, model=model, seq=seq, forward_only=forward_only)
        return Computed(output, _usage(header))

    async def optim_step(self, model: str, seq: int, step: OptimStep) -> Stepped:
        """See `session.ports.Engine`."""
        header, _ = await self._request("optim_step", model=model, seq=seq, **dataclasses.asdict(step))
        return Stepped({str(name): float(value) for name, value in header["metrics"].items()}, _usage(header))

    async def drop_gradients(self, model: str, seq: int) -> None:
        """See `session.ports.Engine`."""
        await self._request("drop_gradients", model=model, seq=seq)

    async def write(
        self,
        model: str,
        seq: int,
        path: str,
        parts: Parts,
        about: About | None = None,
        recipients: Sequence[str] = (),
    ) -> Written:
        """See `session.ports.Engine`."""
        told = None if about is None else dataclasses.asdict(about)
        header, _ = await self._request(
            "write", model=model, seq=seq, path=path, parts=parts, about=told, recipients=list(recipients)
        )
        return _written(header)

    async def snapshot(self, model: str, seq: int, path: str) -> Awaitable[Written]:
        """See `session.ports.Engine`."""
        written: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        written.add_done_callback(_retrieved)
        self._snapshots[path] = written
        try:
            await self._request("snapshot", model=model, seq=seq, path=path)
        except BaseException:
            self._snapshots.pop(path, None)
            raise
        return written

    async def sample(self, weights: FrozenWeights | None, sample: Sample, key: str, prompt: bytes = b"") -> Computed:
        """See `session.ports.Engine`."""
        stored: dict[str, Any] = {"weights": None}
        if weights is not None:
            stored = {"weights": weights.path, "sha256": weights.sha256, "lora": dataclasses.asdict(weights.lora)}
        targets = sample.target_prompt_logprobs
        number = next(self._ids)
        asking = self._ask(
            "sample",
            prompt,
            number=number,
            **stored,
            key=key,
            prompt=sample.prompt,
            num_samples=sample.num_samples,
            max_tokens=sample.max_tokens,
            temperature=sample.temperature,
            top_p=sample.top_p,
            top_k=sample.top_k,
            seed=sample.seed,
            stop=sample.stop,
            prompt_logprobs=sample.prompt_logprobs,
            prompt_logprobs_last_n=sample.prompt_logprobs_last_n,
            topk_prompt_logprobs=sample.topk_prompt_logprobs,
            topk_sample_logprobs=sample.topk_sample_logprobs,
            target_prompt_logprobs=None if targets is None else dataclasses.asdict(targets),
            prompt_alt_tokens_k=sample.prompt_alt_tokens_k,
        )
        try:
            header, response = await asking
        except asyncio.CancelledError:
            if not self._lost.is_set():  # its answer, if there is one, finds nobody
                self._writer.write(frames.encode({"id": next(self._ids), "op": "cancel", "sample": number}))
            raise
        return Computed(response, _usage(header))

    async def wait_lost(self) -> None:
        """See `session.ports.Engine`."""
        await self._lost.wait()

    async def close(self) -> None:
        """Closes the socket, upon which the engine exits. Never raises."""
        self._receiver.cancel()
        self._listener.cancel()
        await asyncio.wait([self._receiver, self._listener])
        self._end()

    async def _request(self, op: str, body: bytes = b"", **fields: Any) -> tuple[frames.Header, bytes]:
        """Ask for one thing after the other, as the engine does them so; samples alone are under way side by side."""
        async with self._turn:
            return await self._ask(op, body, **fields)

    async def _ask(
        self, op: str, body: bytes = b"", *, number: int | None = None, **fields: Any
    ) -> tuple[frames.Header, bytes]:
        if self._lost.is_set():
            raise EngineLost(f"engine {self._pid} is gone")
        number = next(self._ids) if number is None else number
        try:
            frame = frames.encode({"id": number, "op": op, **fields}, body)
        except frames.FrameError as error:
            raise EngineRefused(f"body: too large for the engine: {error}", "user") from error
        answer: asyncio.Future[tuple[frames.Header, bytes]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._writer.write(frame)
        try:
            await self._writer.drain()
            header, content = await answer
        except OSError as error:
            raise EngineLost(f"engine {self._pid} is gone: {error}") from error
        finally:
            self._answers.pop(number, None)
        if header["ok"] is not True:
            category: Category = "user" if header["category"] == "user" else "server"
            raise EngineRefused(str(header["error"]), category, out_of_space=header.get("out_of_space") is True)
        return header, content

    async def _receive(self) -> None:
        try:
            while True:
                header, body = await frames.read(self._reader)
                self._received += 1
                if "event" in header:
                    if header["event"] != "alive":
                        self._on_event(header)
                    continue
                answer = self._answers.get(int(header["id"]))
                if answer is not None and not answer.done():
                    answer.set_result((header, body))
        except (asyncio.IncompleteReadError, OSError):
            _log.warning("engine lost", engine_pid=self._pid)
        except (frames.FrameError, KeyError, ValueError) as error:
            _log.error("engine let go: it broke the protocol", engine_pid=self._pid, error=repr(error))
        finally:
            self._end()

    async def _listen(self) -> None:
        """Kill the engine once it has been silent for too long: a frozen process never ends by itself."""
        silent = 0
        while silent < SILENT_CHECKS:
            before = self._received
            await asyncio.sleep(LISTEN_SECONDS)
            silent = 0 if self._received != before else silent + 1
        if not self._lost.is_set():
            _log.error("engine killed: it is frozen", engine_pid=self._pid)
            self._end()
            _kill(self._pid)

    def _on_event(self, header: frames.Header) -> None:
        written = self._snapshots.pop(header["path"], None)
        if written is None or written.done():
            return
        if header["event"] == "written":
            written.set_result(_written(header))
        else:
            written.set_exception(EngineRefused(str(header["error"]), "server"))

    def _end(self) -> None:
        self._lost.set()
        self._writer.transport.abort()  # not `close`, which waits for a stopped engine to take what is buffered
        waiters: list[asyncio.Future[Any]] = [*self._answers.values(), *self._snapshots.values()]
        for waiting in waiters:
            if not waiting.done():
                waiting.set_exception(EngineLost(f"engine {self._pid} is gone"))
                _retrieved(waiting)
        self._snapshots.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class SpareSocket:
    """Where engines come from: each connection to the spare's socket is a new one. Implements `EngineSource`."""

    path: Path
    base_model: str
    files_sha256: str

    async def connect(self) -> EngineClient:
        """A new engine that has said hello.

        Raises:
            OSError: no spare listens (yet), or the engine said nothing in time.
            EOFError: the spare or the engine ended before the hello.
        """
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        try:
            try:
                async with asyncio.timeout(HELLO_SECONDS):
                    hello, _ = await frames.read(reader)
            except TimeoutError:
                spare = _peer(writer)
                _log.error("spare killed: it is frozen, or its engine is", spare_pid=spare)
                _kill(spare)  # the supervisor starts another one
                raise
            said = hello.get("base_model"), hello.get("files_sha256")
            if hello.get("event") != "hello" or said != (self.base_model, self.files_sha256):
                raise ConnectionError(f"the spare loaded {said}, not {(self.base_model, self.files_sha256)}")
            return EngineClient(reader, writer, hello)
        except BaseException:
            writer.close()
            raise


def _peer(writer: asyncio.StreamWriter) -> int:
    """Process id of whoever listens at the other end."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def _kill(pid: int) -> None:
    """End a process of this pod that holds a connection of ours, so that its number is still its own."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _written(header: frames.Header) -> Written:
    return Written(sha256=str(header["sha256"]), size=int(header["bytes"]))


def _usage(header: frames.Header) -> Usage:
    return Usage(**header.get("usage", {}))


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Marks an exception as seen: whoever abandoned the future does not need it reported."""
    if future.done() and not future.cancelled():
        future.exception()
