"""Running one operation on an engine that holds its model at the operation before it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import structlog

from everloop_trainer.session.admission import refuse_memory, refuse_model, refuse_save
from everloop_trainer.session.context import Context
from everloop_trainer.session.errors import Category, EngineRefused
from everloop_trainer.session.history import Model
from everloop_trainer.session.identifiers import CREATION, sampling_session_id, session_of, storage_id, tinker_path
from everloop_trainer.session.loading import Loading, loaded_step
from everloop_trainer.session.operations import (
    FROZEN,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Refused,
    Sample,
    Save,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    asked_kind,
)
from everloop_trainer.session.outcomes import JSON, PROTOBUF, ContentType
from everloop_trainer.session.poison import cause
from everloop_trainer.session.ports import (
    ALPHA,
    About,
    Computed,
    Engine,
    FrozenWeights,
    Lora,
    Manifest,
    Parts,
    Place,
    Usage,
    Written,
)
from everloop_trainer.session.records import CheckpointKind, Loaded, Result, Stored
from everloop_trainer.session.recovery import stands_on
from everloop_trainer.session.streams import Entry
from everloop_trainer.session.windows import Failure, spoiling_failure
from everloop_trainer.session.work import BASE, UNKNOWN

CANCELLED = "sample: cancelled by its client before it ended"
"""What somebody is told who asks for a sample that was cancelled; the SDK itself does not ask any more."""
SKIPPED = "skipped_no_gradients"
"""Metric of an optim_step that found no gradients and changed nothing."""

Ending = tuple[Result, bytes]
log = structlog.get_logger(__name__)


class Execution:
    """Runs operations. Everything but the engine's state and stored checkpoints is left to the caller."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._loading = Loading(context)

    async def request(self, entry: Entry) -> bytes:
        """What `run` needs of the body that an operation was accepted with. Raises JournalDamaged, StorageFailed."""
        args = entry.args
        needed = isinstance(args, ForwardBackward) or (isinstance(args, Sample) and args.prompt_in_body)
        return await self._context.journal.read(entry.accepted) if needed else b""

    async def run(self, engine: Engine, generation: int, entry: Entry, request: bytes) -> tuple[Result, bytes, float]:
        """The result record of an operation, its body, and the seconds of the try that came to it.

        Tries before that, and the time between them, were waits for space.

        Raises:
            ConnectionError, EOFError: the engine was lost; the operation did not happen.
            Fenced, StorageFailed: this incarnation is over.
        """
        context = self._context
        try:
            while True:
                begun = context.config.monotonic()
                try:
                    result, body = await self._run(engine, generation, entry, request)
                    return result, body, context.config.monotonic() - begun
                except EngineRefused as refused:
                    if not refused.out_of_space:
                        result, body = self._failed(entry, refused.error, refused.category)
                        return result, body, context.config.monotonic() - begun
                    if not context.full:
                        log.error("no space for what is to be stored: waiting", operation=entry.request_id)
                    context.full = refused.error
                # Nothing fails for lack of space. Only the write itself tells whether there is enough for it.
                await asyncio.sleep(context.config.space_interval)
        finally:
            context.full = ""

    def give_up(self, entry: Entry) -> Ending:
        """The result of an operation that no engine survives."""
        return self._failed(entry, cause(asked_kind(entry.args), entry.request_id), "server")

    def cancel(self, entry: Entry) -> Ending:
        """The result of a sample that nobody waits for any more."""
        return self._failed(entry, CANCELLED)

    async def _run(self, engine: Engine, generation: int, entry: Entry, request: bytes) -> Ending:
        args = entry.args
        if isinstance(args, Refused):
            return self._failed(entry, args.error)
        if isinstance(args, Sample):
            return await self._sample(engine, entry, args, request)
        if isinstance(args, CreateModel):
            return await self._create(engine, entry, args)
        if isinstance(args, LoadWeights) and entry.seq == CREATION:
            return await self._load(engine, generation, entry, args)
        model = self._context.history.models.get(entry.stream)
        if model is None:
            creation = self._context.history.streams[entry.stream].entries[CREATION].ended
            reason = creation.result.error if creation is not None else None
            return self._failed(entry, f"model_id: {entry.stream} was not created: {reason}")
        match args:
            case ForwardBackward():
                computed = await engine.forward_backward(entry.stream, entry.seq, args.forward_only, request)
                return self._computed(entry, storage_id(entry.stream), computed)
            case OptimStep():
                return await self._optimize(engine, entry, args, model)
            case LoadWeights():
                return await self._load(engine, generation, entry, args)
            case SaveWeights():
                return await self._save(engine, generation, entry, args, model, "weights")
            case SaveWeightsForSampler():
                return await self._save(engine, generation, entry, args, model, "sampler_weights")
            case SaveWeightsExternal():
                return await self._save(engine, generation, entry, args, model, "external_weights")

    async def _create(self, engine: Engine, entry: Entry, args: CreateModel) -> Ending:
        config = self._context.config
        models = len(self._context.history.models)
        error = refuse_model(args, config.base_model, config.max_models, config.max_rank, models)
        if error is not None:
            return self._failed(entry, error)
        assert args.seed is not None, "seeds are resolved at acceptance"
        lora = Lora(args.rank, args.seed, args.train_mlp, args.train_attn, args.train_unembed)
        error = refuse_memory(args.KIND, lora, await engine.room(lora))
        if error is not None:
            return self._failed(entry, error)
        await engine.init(entry.stream, lora)
        return self._answered(entry, {"model_id": entry.stream, "type": "create_model"})

    async def _optimize(self, engine: Engine, entry: Entry, args: OptimStep, model: Model) -> Ending:
        failure = spoiling_failure(self._context.history.window(entry.stream), entry.accepted)
        if failure is not None:
            await engine.drop_gradients(entry.stream, entry.seq)
            return self._failed(entry, _spoilt(failure), gradients_dropped=True)
        stepped = await engine.optim_step(entry.stream, entry.seq, args)
        self._use(entry, storage_id(entry.stream), stepped.usage)
        step = model.step if SKIPPED in stepped.metrics else model.step + 1
        return self._answered(entry, {"metrics": stepped.metrics, "type": "optim_step"}, step=step)

    async def _load(self, engine: Engine, generation: int, entry: Entry, args: LoadWeights) -> Ending:
        source = self._loading.source(entry, args)
        if isinstance(source, str):
            return self._failed(entry, source)
        if entry.stream not in self._context.history.models:
            error = refuse_memory(args.KIND, source.lora, await engine.room(source.lora))
            if error is not None:
                return self._failed(entry, error)
        with self._context.underway.of(f"the load of {entry.request_id}"):
            loaded = await self._loading.run(engine, generation, entry, args, source)
        answer = {"path": args.path, "model_id": entry.stream, "type": args.KIND}
        return self._answered(entry, answer, step=loaded_step(args, source), loaded=loaded)

    async def _save(
        self,
        engine: Engine,
        generation: int,
        entry: Entry,
        args: Save,
        model: Model,
        kind: CheckpointKind,
    ) -> Ending:
        path = None if args.name is None else tinker_path(entry.stream, kind, args.name)
        found = self._context.history.checkpoints.get(path) if path is not None else None
        # An automatic checkpoint gives way: whether there is one of that name is a matter of time, not of the loop.
        taken = found is not None and found.stored.key not in model.automatic
        error = refuse_save(args, existing=taken)
        if error is not None:
            return self._failed(entry, error)
        with self._context.underway.of(f"the checkpoint of {entry.request_id}"):
            manifest = await self._store(engine, generation, entry, args, model, kind)
        stored = Stored(kind, manifest.key, manifest.sha256, manifest.size, manifest.time)
        answer: dict[str, Any] = {"path": path, "type": args.KIND}
        if isinstance(args, SaveWeightsExternal):
            answer["size_bytes"] = manifest.size
        if path is None and isinstance(args, SaveWeightsForSampler) and args.sampling_session_seq_id is not None:
            sampler = sampling_session_id(session_of(entry.stream), args.sampling_session_seq_id)
            answer = {"sampling_session_id": sampler, "type": args.KIND}
        return self._answered(entry, answer, stored=stored)

    async def _store(
        self,
        engine: Engine,
        generation: int,
        entry: Entry,
        args: Save,
        model: Model,
        kind: CheckpointKind,
    ) -> Manifest:
        states = self._context.states
        manifest = await states.find(kind, entry.stream, entry.request_id)
        if manifest is None:
            place = states.place(kind, entry.stream, entry.seq, generation)
            parts: Parts = "all" if isinstance(args, SaveWeights) else "weights"
            recipients = args.recipients if isinstance(args, SaveWeightsExternal) else ()
            about = self._about(entry, args)
            written = await engine.write(entry.stream, entry.seq, place.path, parts, about, recipients)
            manifest = self._manifest(entry, args, model, kind, place, written)
            await states.commit(manifest)
        return manifest

    def _about(self, entry: Entry, args: Save) -> About | None:
        """What a named adapter says of itself; those for one sampling session alone are nobody's to take along."""
        if args.name is None or isinstance(args, SaveWeights):
            return None
        base = self._context.config.base_model
        return About(base.name, base.revision, entry.stream, args.name)

    def _manifest(
        self,
        entry: Entry,
        args: Save,
        model: Model,
        kind: CheckpointKind,
        place: Place,
        written: Written,
    ) -> Manifest:
        config = self._context.config
        return Manifest(
            kind=kind,
            key=place.key,
            model=entry.stream,
            operation=entry.request_id,
            seq=entry.seq,
            step=model.step,
            stands_on=stands_on(entry, self._context.history.streams[entry.stream].entries),
            base_model=config.base_model,
            lora=model.info.lora,
            alpha=ALPHA,
            sha256=written.sha256,
            size=written.size,
            time=config.now(),
            name=args.name,
            ttl_seconds=args.ttl_seconds,
            user_metadata=args.user_metadata,
        )

    async def _sample(self, engine: Engine, entry: Entry, args: Sample, request: bytes) -> Ending:
        key = self._context.keys.of(entry.stream)
        if args.weights is None:
            return self._computed(entry, BASE, await engine.sample(None, args, key, request))
        checkpoint = self._context.history.frozen.get(args.weights) if args.weights.startswith(FROZEN) else None
        if checkpoint is not None and checkpoint.stored.kind == "external_weights":
            error = (
                f"{checkpoint.path} was saved to be downloaded and can't be sampled from; save weights for a sampler"
            )
            return self._failed(entry, f"sampling_session_id: {error}")
        if checkpoint is None:
            return self._failed(entry, f"sampling_session_id: no weights are stored here for {args.weights!r}")
        stored = checkpoint.stored
        weights = FrozenWeights(
            self._context.states.path(stored.kind, checkpoint.home, stored.key),
            stored.sha256,
            checkpoint.lora,
        )
        computed = await engine.sample(weights, args, key, request)
        return self._computed(entry, storage_id(checkpoint.model_id), computed)

    def _computed(self, entry: Entry, model: str, computed: Computed) -> Ending:
        self._use(entry, model, computed.usage)
        return self._succeeded(entry, computed.body, PROTOBUF)

    def _use(self, entry: Entry, model: str, usage: Usage) -> None:
        self._context.work.use(model, self._context.keys.known(entry.stream) or UNKNOWN, usage)

    def _answered(
        self,
        entry: Entry,
        answer: dict[str, Any],
        *,
        step: int | None = None,
        stored: Stored | None = None,
        loaded: Loaded | None = None,
    ) -> Ending:
        return self._succeeded(entry, json.dumps(answer, separators=(",", ":")).encode(), JSON, step, stored, loaded)

    def _succeeded(
        self,
        entry: Entry,
        body: bytes,
        content_type: ContentType,
        step: int | None = None,
        stored: Stored | None = None,
        loaded: Loaded | None = None,
    ) -> Ending:
        step = self._step(entry) if step is None else step
        return Result(entry.stream, entry.seq, True, content_type, step, stored=stored, loaded=loaded), body

    def _failed(
        self, entry: Entry, error: str, category: Category = "user", *, gradients_dropped: bool = False
    ) -> Ending:
        step = self._step(entry)
        text = error.encode(errors="backslashreplace").decode()  # what cannot be read back must not be journaled
        return Result(entry.stream, entry.seq, False, JSON, step, text, category, gradients_dropped), b""

    def _step(self, entry: Entry) -> int:
        model = self._context.history.models.get(entry.stream)
        return model.step if model is not None else 0


def _spoilt(failure: Failure) -> str:
    """What the client is told of an optim_step that was not applied for a failure in its window."""
    why = "this step was sent before its failure was delivered"
    if failure.beside is not None:
        why = (
            f"operation {failure.beside} was sent before its failure was delivered, so that both may be parts of one "
            "forward_backward"
        )
    return (
        f"optim_step: operation {failure.seq} of this accumulation window failed and {why}; nothing was changed and "
        "the accumulated gradients were dropped"
    )
