"""An engine: answers the requests on its connection, and is gone when the connection is.

Samples are under way side by side; between two of their steps it does whatever else came, one thing at a time.

Bad content ends as an answer of category `user`, lack of memory or storage as one of category `server`; both leave the
state as it was. A broken accelerator ends the pod. Anything else is a defect: the process logs it and exits, and the
server goes on with a new engine.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from everloop_trainer import peftfiles
from everloop_trainer.about import About
from everloop_trainer.engine import framing, memory, state
from everloop_trainer.engine.adam import AdamParams
from everloop_trainer.engine.base import BaseModel
from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.datums import parse_request
from everloop_trainer.engine.errors import ContentError, StateError, accelerator_failed, out_of_memory
from everloop_trainer.engine.inputs import read_chunks
from everloop_trainer.engine.lora import Adapter, LoraSpec, layout
from everloop_trainer.engine.model import LoraModel, load_adapter
from everloop_trainer.engine.requests import SampleRequest
from everloop_trainer.engine.sampling import Sampler
from everloop_trainer.engine.spare import EXIT_DEFECT
from everloop_trainer.engine.targets import PromptTargets
from everloop_trainer.exitcodes import ACCELERATOR_FAILED
from everloop_trainer.termination import give_up
from everloop_trainer.tinker_proto import tinker_public

_log = logging.getLogger(__name__)

_FROZEN_ADAPTERS = 4
_LONGEST_ERROR = 2000
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
BEAT_SECONDS = 2.0
"""How often an engine says that it lives; a server that hears nothing for long takes it for frozen."""

_NO_MEMORY = {"ok": False, "error": "the engine is out of memory", "category": "server"}

Answer = tuple[dict[str, Any], bytes]


class Worker:
    """The request loop of one engine process."""

    def __init__(self, connection: socket.socket, base: BaseModel, config: SpareConfig) -> None:
        self._connection = connection
        self._base = base
        self._config = config
        self._models: dict[str, LoraModel] = {}
        self._frozen: OrderedDict[str, Adapter] = OrderedDict()
        self._sampler = Sampler(base)
        self._sending = threading.Lock()
        self._snapshots: queue.SimpleQueue[tuple[str, int, Path, state.StateFile]] = queue.SimpleQueue()
        self._operations: dict[str, Callable[[Mapping[str, Any], bytes], Answer]] = {
            "room": self._room,
            "init": self._init,
            "restore": self._restore,
            "load": self._load,
            "drop": self._drop,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "drop_gradients": self._drop_gradients,
            "write": self._write,
            "snapshot": self._snapshot,
            "cancel": self._cancel,
        }

    def run(self) -> int:
        """Serve until the connection ends and return the exit status 0. Any exception is a defect."""
        threading.excepthook = _end_with_thread
        threading.Thread(target=_exit_with_connection, args=(self._connection,), daemon=True).start()
        threading.Thread(target=self._write_snapshots, daemon=True).start()
        try:
            self._send(self._hello())
            threading.Thread(target=self._beat, daemon=True).start()
            while True:
                while not self._sampler.busy or self._readable():
                    self._answer(*framing.receive(self._connection))
                self._step()
        except (EOFError, OSError) as error:
            _log.info("engine ends: %s", error)
            return 0
        except Exception:
            _log.exception("engine ends: defect")
            raise

    def _hello(self) -> dict[str, Any]:
        return {
            "event": "hello",
            "pid": os.getpid(),
            "base_model": self._base.name,
            "vocab_size": self._base.vocab_size,
            "max_sequence_length": self._base.max_sequence_length,
            "files_sha256": self._base.files_sha256,
            "dtype": self._config.dtype,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        }

    def _readable(self) -> bool:
        return bool(select.select([self._connection], [], [], 0)[0])

    def _answer(self, header: Mapping[str, Any], body: bytes) -> None:
        try:
            if header["op"] == "sample":
                self._sample(header, body)  # answered when it ends
                return
            answer, content = self._operations[header["op"]](header, body)
        except ContentError as error:
            answer, content = _refusal(error), b""
        except (MemoryError, RuntimeError) as error:
            if accelerator_failed(error):
                _end_with_accelerator(error)
            if not out_of_memory(error):
                raise
            _log.warning("%s failed: out of memory", header["op"])
            answer, content = _NO_MEMORY, b""
        except (StateError, OSError) as error:
            _log.warning("%s failed: %s", header["op"], error)
            full = isinstance(error, OSError) and error.errno in _FULL
            answer = {"ok": False, "error": str(error), "category": "server", "out_of_space": full}
            content = b""
        else:
            answer = {"ok": True, **answer}
        self._send({"id": header["id"], **answer}, content)

    def _send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        with self._sending:
            framing.send(self._connection, header, body)

    def _model(self, header: Mapping[str, Any]) -> LoraModel:
        try:
            return self._models[header["model"]]
        except KeyError:
            raise StateError(f"model {header['model']!r} is not loaded") from None

    def _init(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        spec = _lora_spec(header)
        spec.check(self._config.max_rank)
        model = self._models[header["model"]] = LoraModel.fresh(self._base, spec)
        return {"parameters": model.parameters}, b""

    def _room(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        """What an adapter would need, and what is left once every model has its gradients."""
        spec = _lora_spec(header)
        spec.check(self._config.max_rank)
        parameters = layout(spec, self._base.targets)[-1].stop
        found = memory.available()
        free = found.free - sum(model.missing_bytes for model in self._models.values())
        needed = memory.model_bytes(parameters)
        return {"parameters": parameters, "needed": needed, "free": free, "total": found.total, "of": found.of}, b""

    def _restore(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        spec = _lora_spec(header["lora"])
        spec.check(self._config.max_rank)
        path = Path(header["path"])
        _check_sha256(path, header["sha256"])
        model = self._models[header["model"]] = LoraModel.restored(self._base, path, spec, header["parts"])
        return {"seq": model.seq, "step": model.step, "gradients": model.has_gradients}, b""

    def _load(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        spec = _lora_spec(header["lora"])
        spec.check(self._config.max_rank)
        path = Path(header["path"])
        _check_sha256(path, header["sha256"])
        model = LoraModel.loaded(self._base, path, spec, optimizer=header["optimizer"])
        self._models[header["model"]] = model
        return {"step": model.step}, b""

    def _drop(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        self._models.pop(header["model"], None)
        return {}, b""

    def _forward_backward(self, header: Mapping[str, Any], body: bytes) -> Answer:
        model = self._model(header)
        batch = parse_request(body, self._base.limits)
        run = model.forward if header["forward_only"] else model.forward_backward
        outcome = run(self._base, header["seq"], batch, self._config.micro_batch_tokens)
        tokens = {"scored" if header["forward_only"] else "trained": sum(len(datum.tokens) for datum in batch.data)}
        return {"usage": {**outcome.seconds, **tokens}}, outcome.to_proto()

    def _optim_step(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        params = AdamParams(**{name: float(header[name]) for name in AdamParams.__dataclass_fields__})
        started = time.monotonic()
        metrics = self._model(header).optim_step(header["seq"], params)
        return {"metrics": metrics, "usage": {"optimizer": time.monotonic() - started}}, b""

    def _drop_gradients(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        self._model(header).drop_gradients(header["seq"])
        return {}, b""

    def _write(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        content = self._model(header).state(header["seq"], header["parts"], copy=False)
        path = Path(header["path"])
        written = state.write_state(path, content)
        if header.get("about") is not None:
            try:
                peftfiles.complete(path, About(**header["about"]))
                if header.get("recipients"):
                    written = state.Written(*peftfiles.seal(path, header["recipients"]))
            except OSError:
                peftfiles.remove(path)  # whoever tries again finds the place empty
                raise
        return asdict(written), b""

    def _snapshot(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        content = self._model(header).state(header["seq"], "all", copy=True)
        self._snapshots.put((header["model"], header["seq"], Path(header["path"]), content))
        return {}, b""

    def _write_snapshots(self) -> None:
        """Write snapshots in the background; no torch here, so the bits of what is being computed stay as they are."""
        while True:
            model, seq, path, content = self._snapshots.get()
            event: dict[str, Any] = {"model": model, "seq": seq, "path": str(path)}
            started = time.monotonic()
            try:
                written = state.write_state(path, content)
            except OSError as error:
                _log.warning("snapshot %s failed: %s", path, error)
                self._send({"event": "write_failed", **event, "error": str(error)})
            else:
                _log.info("snapshot %s: %d bytes in %.2f s", path, written.bytes, time.monotonic() - started)
                self._send({"event": "written", **event, **asdict(written)})

    def _beat(self) -> None:
        """Say now and then that the process runs, also during a long step; ends with the connection."""
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self._send({"event": "alive"})
            except OSError:
                return

    def _sample(self, header: Mapping[str, Any], body: bytes) -> None:
        adapter = None if header["weights"] is None else self._frozen_adapter(header)
        values = {name: header[name] for name in SampleRequest.__dataclass_fields__ if name != "images"}
        values["target_prompt_logprobs"] = PromptTargets.from_header(values["target_prompt_logprobs"])
        if body:  # a prompt with images
            read = read_chunks("prompt", tinker_public.Datum.FromString(body).model_input, self._base.limits)
            values |= {"prompt": read.tokens.tolist(), "images": read.images}
        self._sampler.add(header["id"], SampleRequest(**values), adapter, header["key"])

    def _cancel(self, header: Mapping[str, Any], _body: bytes) -> Answer:
        self._sampler.cancel(header["sample"])
        return {}, b""

    def _step(self) -> None:
        """One token more for each sample, and the answers of those requests that have ended."""
        try:
            answers = self._sampler.step(self._readable)
        except (MemoryError, RuntimeError) as error:
            if accelerator_failed(error):
                _end_with_accelerator(error)
            if not out_of_memory(error):
                raise
            _log.warning("a step of samples failed: out of memory")
            self._send({"id": self._sampler.give_way(), **_NO_MEMORY})
            return
        for key, outcome in answers:
            if isinstance(outcome, ContentError):
                self._send({"id": key, **_refusal(outcome)})
            else:
                self._send({"id": key, "ok": True, "usage": outcome.usage}, outcome.body)

    def _frozen_adapter(self, header: Mapping[str, Any]) -> Adapter:
        """Return stored weights to sample from, by the hash of their file; the least recently used make room."""
        digest = header["sha256"]
        adapter = self._frozen.pop(digest, None)
        if adapter is None:
            path = Path(header["weights"])
            _check_sha256(path, digest)
            adapter, _ = load_adapter(self._base, path, _lora_spec(header["lora"]), "weights")
        self._frozen[digest] = adapter
        while len(self._frozen) > _FROZEN_ADAPTERS:
            self._frozen.popitem(last=False)
        return adapter


def _refusal(error: ContentError) -> dict[str, Any]:
    return {"ok": False, "error": _shortened(str(error)), "category": "user"}


def _shortened(text: str) -> str:
    """Keep what a user wrote from making the answer longer than a message can be."""
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


def _lora_spec(values: Mapping[str, Any]) -> LoraSpec:
    return LoraSpec(**{name: values[name] for name in LoraSpec.__dataclass_fields__})


def _check_sha256(path: Path, expected: str) -> None:
    found = state.file_sha256(path)
    if found != expected:
        raise StateError(f"{path}: SHA-256 is {found}, expected {expected}")


def _end_with_accelerator(error: Exception) -> NoReturn:
    """End the process, and through its exit status the pod: the next one runs on another node."""
    os._exit(give_up(ACCELERATOR_FAILED, f"AcceleratorFailed: {_shortened(str(error))}"))


def _end_with_thread(failure: threading.ExceptHookArgs) -> None:
    """End the process: an engine whose snapshots silently stopped would be worse than none."""
    _log.error("engine ends: %s failed: %r", failure.thread, failure.exc_value)
    os._exit(EXIT_DEFECT)


def _exit_with_connection(connection: socket.socket) -> None:
    """Wait for the peer to close the connection and end the process at once, whatever it is doing."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    while not poll.poll():
        pass
    os._exit(0)
