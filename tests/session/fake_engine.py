"""A deterministic engine in integers: exact equality means that the same operations were applied in the same order.

An adapter is a number that every applied gradient scrambles, with the list of what was applied, so that an update that
was applied twice, left out or moved shows. The "accelerator" dies when told: in the middle of an operation, or idle.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everloop_trainer.session.errors import EngineRefused
from everloop_trainer.session.operations import OptimStep, Sample
from everloop_trainer.session.ports import About, Computed, FrozenWeights, Lora, Parts, Room, Stepped, Usage, Written
from everloop_trainer.store.space import is_full

if TYPE_CHECKING:
    from tests.session.world import ProcessFiles

PRIME = (1 << 61) - 1
PREFIX = "/disk/"
PIDS = itertools.count(1000)


@dataclass
class Adapter:
    """State of one model."""

    lora: dict[str, Any]
    weights: int
    momentum: int = 0
    gradients: list[int] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    """Numbers of the optim_steps that changed the weights."""
    seq: int = 0

    def dump(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def fresh(cls, lora: Lora) -> Adapter:
        return cls(dataclasses.asdict(lora), weights=(lora.seed * 7919 + lora.rank) % PRIME)

    def gradient(self, body: bytes) -> int:
        """What a forward_backward of this body finds."""
        return int.from_bytes(hashlib.sha256(body + str(self.weights).encode()).digest()[:7], "big")

    def apply(self, seq: int, learning_rate: float) -> dict[str, float]:
        """One optimizer step; its metrics."""
        if not self.gradients:
            return {"skipped_no_gradients": 1.0}
        for gradient in self.gradients:
            self.momentum = (self.momentum * 31 + gradient) % PRIME
        self.weights = (self.weights * 17 + self.momentum + round(learning_rate * 1e6)) % PRIME
        self.gradients.clear()
        self.applied.append(seq)
        return {"norm": float(self.momentum % 1000)}

    def begun(self, *, optimizer: bool) -> Adapter:
        """A model that begins with this checkpoint: without its gradients, and without its optimizer on demand."""
        if not optimizer:
            return Adapter(self.lora, self.weights)
        return dataclasses.replace(self, gradients=[], applied=list(self.applied), seq=0)


def sampled(content: bytes, sample: Sample, prompt: bytes = b"") -> bytes:
    """What a sample from weights of this content says."""
    text = repr((content, prompt or sample.prompt, sample.num_samples, sample.seed)).encode()
    return b"sampled " + hashlib.sha256(text).hexdigest().encode()


class FakeEngine:
    """session.ports.Engine. `hook` is called before and in the middle of each call and may kill it."""

    def __init__(self, files: ProcessFiles, hook: Callable[[FakeEngine, str], None] | None = None) -> None:
        self._files = files
        self._hook = hook
        self.pid = next(PIDS)
        self.models: dict[str, Adapter] = {}
        self.calls: list[tuple[str, str, int]] = []
        self.keys: list[str] = []
        """Of each sample."""
        self.lost = asyncio.Event()
        self.gate: asyncio.Event | None = None
        """While set up and not set, computing calls wait in the middle."""
        self.rooms: dict[int, Room] = {}
        """By rank, where there is less than enough."""

    def die(self) -> None:
        self.lost.set()

    async def _step(self, op: str, model: str = "", seq: int = -1) -> None:
        self.calls.append((op, model, seq))
        if self._hook is not None:
            self._hook(self, op)
        await asyncio.sleep(0)
        if self.gate is not None:
            waiting = [asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(self.lost.wait())]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
        self._alive()

    def _alive(self) -> None:
        if self.lost.is_set():
            raise ConnectionResetError("engine died")

    async def room(self, lora: Lora) -> Room:
        return self.rooms.get(lora.rank, Room(lora.rank, lora.rank, 1024, 1024, "this test"))

    async def init(self, model: str, lora: Lora) -> None:
        await self._step("init", model)
        self.models[model] = Adapter.fresh(lora)

    async def restore(self, model: str, path: str, lora: Lora, sha256: str, parts: Parts) -> None:
        await self._step("restore", model)
        data = self._load(path, sha256)
        assert parts == "all"
        self.models[model] = Adapter(**json.loads(data))

    def _load(self, path: str, sha256: str) -> bytes:
        try:
            with self._files.open_read(path.removeprefix(PREFIX)) as file:
                data = file.read()
        except FileNotFoundError as error:
            raise EngineRefused(str(error), "server") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise EngineRefused(f"{path}: hash differs", "server")
        return data

    async def load(self, model: str, path: str, lora: Lora, sha256: str, optimizer: bool) -> None:
        await self._step("load", model)
        data = json.loads(self._load(path, sha256))
        if isinstance(data, int):  # a sampler's
            assert not optimizer
            data = {"lora": dataclasses.asdict(lora), "weights": data}
        adapter = Adapter(**data)
        assert adapter.lora == dataclasses.asdict(lora)
        self.models[model] = adapter.begun(optimizer=optimizer)

    async def drop(self, model: str) -> None:
        del self.models[model]

    async def forward_backward(self, model: str, seq: int, forward_only: bool, body: bytes) -> Computed:
        await self._step("forward_backward", model, seq)
        if body.startswith(b"poison") or (body.startswith(b"large") and len(self.models) > 1):
            self.die()
            self._alive()
        if body.startswith(b"bad"):
            raise EngineRefused("data[0].loss_fn_inputs.target_tokens: bad", "user")
        adapter = self.models[model]
        gradient = adapter.gradient(body)
        if not forward_only:
            adapter.gradients.append(gradient)
            self._advance(adapter, seq)
        return Computed(b"loss %d" % gradient, Usage(forward=1.0, backward=2.0, trained=len(body)))

    def _advance(self, adapter: Adapter, seq: int) -> None:
        assert seq > adapter.seq, f"operation {seq} after {adapter.seq}"
        adapter.seq = seq

    async def optim_step(self, model: str, seq: int, step: OptimStep) -> Stepped:
        await self._step("optim_step", model, seq)
        if step.learning_rate < 0:
            raise EngineRefused("adam_params.learning_rate: must not be negative", "user")
        adapter = self.models[model]
        self._advance(adapter, seq)
        return Stepped(adapter.apply(seq, step.learning_rate), Usage(optimizer=0.5))

    async def drop_gradients(self, model: str, seq: int) -> None:
        await self._step("drop_gradients", model, seq)
        adapter = self.models[model]
        self._advance(adapter, seq)
        adapter.gradients.clear()

    async def write(
        self,
        model: str,
        seq: int,
        path: str,
        parts: Parts,
        about: About | None = None,
        recipients: Sequence[str] = (),
    ) -> Written:
        await self._step("write", model, seq)
        adapter = dataclasses.replace(self.models[model], seq=seq)
        data = adapter.dump() if parts == "all" else str(adapter.weights).encode()
        return await self._store(path, f"for {' '.join(recipients)}".encode() if recipients else data)

    async def _store(self, path: str, data: bytes) -> Written:
        while self._files.hangs(path):  # noqa: ASYNC110 - a thread says when it ends
            await asyncio.sleep(0.001)
        self._alive()
        try:
            self._files.write_state(path, data)
        except OSError as error:
            if is_full(error.errno):
                raise EngineRefused(str(error), "server", out_of_space=True) from error
            self.die()
            raise ConnectionResetError("engine died writing") from error
        return Written(hashlib.sha256(data).hexdigest(), len(data))

    async def snapshot(self, model: str, seq: int, path: str) -> Awaitable[Written]:
        await self._step("snapshot", model, seq)
        data = self.models[model].dump()

        async def write() -> Written:
            await asyncio.sleep(0)
            return await self._store(path, data)

        return asyncio.ensure_future(write())

    async def sample(self, weights: FrozenWeights | None, sample: Sample, key: str, prompt: bytes = b"") -> Computed:
        self.keys.append(key)
        await self._step("sample")
        content = b"base" if weights is None else self._load(weights.path, weights.sha256)
        return Computed(sampled(content, sample, prompt), Usage(prompt=len(sample.prompt), sampled=sample.num_samples))

    async def wait_lost(self) -> None:
        await self.lost.wait()

    async def close(self) -> None:
        self.die()


@dataclass
class FakeSource:
    """Engines, one after another; `hook` goes into each. `available` unset means that none can be had."""

    files: ProcessFiles
    hook: Callable[[FakeEngine, str], None] | None = None
    engines: list[FakeEngine] = field(default_factory=list)
    available: bool = True
    gate: asyncio.Event | None = None
    rooms: dict[int, Room] = field(default_factory=dict)
    """Of all its engines."""

    async def connect(self) -> FakeEngine:
        await asyncio.sleep(0)
        if not self.available or self.files.dead:
            raise ConnectionRefusedError("no engine")
        engine = FakeEngine(self.files, self.hook)
        engine.gate = self.gate
        engine.rooms = self.rooms
        self.engines.append(engine)
        return engine
