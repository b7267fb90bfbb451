"""The session's facts, folded from the records of the journal: by the same code at recovery and while serving. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from everloop_trainer.session.copied import CopiedRun
from everloop_trainer.session.identifiers import (
    CREATION,
    request_id,
    sampling_session_id,
    session_of,
    split_request_id,
    storage_id,
    tinker_path,
)
from everloop_trainer.session.metadata import Metadata
from everloop_trainer.session.numbers import Numbers
from everloop_trainer.session.operations import (
    FROZEN,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Refused,
    Save,
    SaveWeightsForSampler,
)
from everloop_trainer.session.outcomes import JSON
from everloop_trainer.session.ports import Lora, Position
from everloop_trainer.session.records import (
    Accept,
    Amended,
    Autosaved,
    CheckpointKind,
    Copied,
    Deliver,
    Dropped,
    Fetched,
    Loaded,
    Lost,
    Open,
    Pruned,
    Record,
    Removed,
    Restored,
    Result,
    Stored,
    Try,
)
from everloop_trainer.session.rollback import RolledBack
from everloop_trainer.session.streams import Ended, Entry, Stream
from everloop_trainer.session.times import after, instant, refuse_ttl
from everloop_trainer.session.windows import Finished, added_gradients, closes_window, is_failure


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that exists (its creation succeeded)."""

    model_id: str
    base_model: str
    lora: Lora
    user_metadata: Metadata = None


@dataclass(frozen=True, slots=True)
class SamplerInfo:
    """A sampling session that a save_weights_for_sampler of this session made.

    `weights` is a `frozen:` name; `kind` is `snapshot` or `inflight`.
    """

    sampling_session_id: str
    model_id: str
    kind: str
    weights: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights that a save operation stored. `name` is None for those frozen for a sampling session.

    `expires` is when it is to be removed, RFC 3339; None for never. `public` as in Amended. `holder` is the model whose
    file it shares, for a copy; empty for one that has its own.
    """

    model_id: str
    name: str | None
    step: int
    lora: Lora
    stored: Stored
    user_metadata: Metadata = None
    expires: str | None = None
    public: bool = False
    holder: str = ""

    @property
    def home(self) -> str:
        """The model below which its file lies."""
        return self.holder or self.model_id

    @property
    def frozen(self) -> str:
        """The `frozen:` name, which means this file for ever."""
        return _frozen(self.model_id, self.stored.key)

    @property
    def path(self) -> str | None:
        """The tinker path, for a named one."""
        return None if self.name is None else tinker_path(self.model_id, self.stored.kind, self.name)


@dataclass(frozen=True, slots=True)
class Handled:
    """A call that changed the checkpoint of a path, by its idempotency key; `removed` tells whether it removed it."""

    path: str
    request: str
    time: str
    removed: bool


HANDLED_FOR = timedelta(hours=24)
"""How long such calls are known, so that a repeat is taken for one."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An operation that has ended and of which only the result is left: the base that holds it, and where."""

    base: str
    offset: int


@dataclass(frozen=True, slots=True)
class Gone:
    """An operation that has ended, whose result was fetched and then kept as long as is promised."""


@dataclass(slots=True)
class Model:
    """What is known of one model: optimizer steps applied, and the numbers that matter of its open accumulation window.

    `root` is the key of the snapshot that its newest load_weights made, if it had one. `automatic` are its automatic
    checkpoints by key, oldest first; `pruned` the keys of those that are no more.
    """

    info: ModelInfo
    step: int = 0
    window: list[int] = field(default_factory=list)
    latest_checkpoint: Checkpoint | None = None
    root: str | None = None
    automatic: dict[str, Checkpoint] = field(default_factory=dict)
    pruned: set[str] = field(default_factory=set)


class History:
    """Streams, models, samplers and checkpoints as the records say they are."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplerInfo] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        """By tinker path: the newest of that name."""
        self.frozen: dict[str, Checkpoint] = {}
        """By `frozen:` name: those that are listed, those of sampling sessions, and those that are not dropped yet."""
        self.handled: dict[tuple[str, str], Handled] = {}
        """By path and idempotency key, oldest first."""
        self.last_request: dict[str, str] = {}
        """By stream: time of the newest acceptance."""
        self.first_request: dict[str, str] = {}
        """By stream: time of the first; not known of streams that an older version compacted."""
        self.inflight: dict[str, str] = {}
        """By model: the `frozen:` name that its inflight samplers use."""
        self.rolled_back: dict[str, RolledBack] = {}
        """Models that ended with the storage that they were on: none of `models`."""
        self.copied: dict[str, CopiedRun] = {}
        """Training runs that hold a copy, for ever: none of `models` either."""

    def apply(self, record: Record, position: Position, *, durable: bool = True) -> None:
        """Take in one record, in the order of the history.

        Raises:
            ValueError: the record contradicts those before it.
        """
        match record:
            case Accept():
                if record.stream not in self.streams:
                    self.first_request[record.stream] = record.time
                stream = self.streams.setdefault(record.stream, Stream(record.stream))
                self.last_request[record.stream] = record.time
                stream.accept(Entry(record.stream, record.seq, record.args, position, durable))
            case Result():
                stream = self._stream(record.stream, record.seq)
                entry = stream.end(record.seq, Ended(record, position))
                self._take_effect(entry, record)
            case Deliver():
                self._deliver(record, position)
            case Fetched():
                self._fetch(record)
            case Try():
                entry = self._stream(record.stream, record.seq).entries[record.seq]
                entry.tries = entry.tries.tried(position.incarnation)
            case Autosaved():
                self._autosave(record)
            case Pruned():
                self._prune(record)
            case Removed():
                self._remove(record)
            case Dropped():
                self._drop(record)
            case Amended():
                self._amend(record)
            case Copied():
                self._copy(record)
            case Lost():
                self._lose(record, position, durable)
            case Restored():
                self._restore(record.model)
            case Open():
                pass

    def _deliver(self, record: Deliver, position: Position) -> None:
        stream = self.streams.get(record.stream)
        if stream is None or not stream.knows(record.seq):
            raise ValueError(f"{request_id(record.stream, record.seq)} was delivered but never accepted")
        entry = stream.entries.get(record.seq)
        if entry is not None:
            entry.delivered = position  # the last: an earlier one came too late for its answer

    def _fetch(self, record: Fetched) -> None:
        stream = self.streams.get(record.stream)
        if stream is None:
            raise ValueError(f"results of {record.stream} were fetched, which has no operations")
        stream.fetched.update(Numbers(record.numbers).without(stream.gone))

    def _autosave(self, saved: Autosaved) -> None:
        model = self.models.get(saved.stream)
        if model is None:
            raise ValueError(f"{saved.name} was saved of {saved.stream}, which was never created")
        checkpoint = Checkpoint(saved.stream, saved.name, saved.step, model.info.lora, saved.stored)
        model.automatic[saved.stored.key] = checkpoint
        self._list(model, checkpoint)

    def _prune(self, pruned: Pruned) -> None:
        model = self.models.get(pruned.stream)
        checkpoint = None if model is None else model.automatic.pop(pruned.key, None)
        if model is None or checkpoint is None:
            raise ValueError(f"{pruned.key} of {pruned.stream} was pruned but never saved")
        model.pruned.add(pruned.key)
        del self.frozen[checkpoint.frozen]
        if checkpoint.path is not None and self.checkpoints.get(checkpoint.path) == checkpoint:
            del self.checkpoints[checkpoint.path]

    def _named(self, model_id: str, key: str) -> tuple[Checkpoint, str]:
        checkpoint = self.frozen.get(_frozen(model_id, key))
        if checkpoint is None or checkpoint.path is None:
            raise ValueError(f"{key} of {model_id} has a record but was never stored under a name")
        return checkpoint, checkpoint.path

    def _remove(self, removed: Removed) -> None:
        """The save that takes its place may come before this in the history, and have been unknown to who wrote it."""
        checkpoint, path = self._named(removed.stream, removed.key)
        if self.checkpoints.get(path) == checkpoint:
            del self.checkpoints[path]
        model = self.models.get(removed.stream)
        if model is not None:
            model.automatic.pop(removed.key, None)
            if model.latest_checkpoint == checkpoint:
                left = [each for each in self.checkpoints.values() if each.model_id == removed.stream]
                model.latest_checkpoint = max(reversed(left), key=lambda each: each.stored.time, default=None)
        if removed.request:
            self._handle(Handled(path, removed.request, removed.time, removed=True))

    def _drop(self, dropped: Dropped) -> None:
        checkpoint, path = self._named(dropped.stream, dropped.key)
        if self.checkpoints.get(path) == checkpoint:
            raise ValueError(f"{dropped.key} of {dropped.stream} was dropped but is listed")
        del self.frozen[checkpoint.frozen]

    def _amend(self, amended: Amended) -> None:
        checkpoint, path = self._named(amended.stream, amended.key)
        changed = replace(checkpoint, expires=amended.expires, public=amended.public)
        self.frozen[checkpoint.frozen] = changed
        if self.checkpoints.get(path) == checkpoint:  # not so if it was replaced, as in `_remove`
            self.checkpoints[path] = changed
        model = self.models.get(amended.stream)
        if model is not None and amended.key in model.automatic:
            model.automatic[amended.key] = changed
        if model is not None and model.latest_checkpoint == checkpoint:
            model.latest_checkpoint = changed
        self._handle(Handled(path, amended.request, amended.time, removed=False))

    def _copy(self, copied: Copied) -> None:
        source, path = self._named(copied.stream, copied.key)
        info, run = self.info(copied.stream), copied.run
        if info is None or run in self.streams:
            raise ValueError(f"{path} was copied into {run}, which has operations already")
        checkpoint = replace(
            source,
            model_id=run,
            stored=replace(source.stored, time=copied.time),
            expires=copied.expires,
            public=False,
            holder=source.home,
        )
        assert checkpoint.path is not None, "it has the name of its source"
        self.streams[run] = Stream(run, closed=True)
        self.last_request[run] = self.first_request[run] = copied.time
        self.copied[run] = CopiedRun(
            run, checkpoint.path, path, source.home, copied.key, info.base_model, source.lora, copied.time
        )
        self.frozen[checkpoint.frozen] = self.checkpoints[checkpoint.path] = checkpoint

    def _handle(self, handled: Handled) -> None:
        oldest = instant(handled.time) - HANDLED_FOR
        for known, call in list(self.handled.items()):
            if instant(call.time) >= oldest:
                break
            del self.handled[known]
        self.handled[handled.path, handled.request] = handled

    def _restore(self, model: RolledBack) -> None:
        name = model.model_id
        if name in self.streams:
            raise ValueError(f"{name} was restored, but has operations already")
        self.streams[name] = Stream(name, done=model.number + 1, floor=model.number + 1, closed=True)
        self.rolled_back[name] = model
        self.last_request[name] = self.first_request[name] = model.time
        for each in model.checkpoints:
            kind: CheckpointKind = "weights" if each.kind == "weights" else "sampler_weights"
            stored = Stored(kind, each.key, each.sha256, each.size, each.time)
            checkpoint = Checkpoint(name, each.name, each.step, model.lora, stored, each.user_metadata)
            self.frozen[checkpoint.frozen] = checkpoint
            if checkpoint.path is not None:
                self.checkpoints[checkpoint.path] = checkpoint

    def _list(self, model: Model, checkpoint: Checkpoint) -> None:
        self.frozen[checkpoint.frozen] = checkpoint
        if checkpoint.path is not None:
            self.checkpoints[checkpoint.path] = checkpoint
            model.latest_checkpoint = checkpoint

    def _lose(self, lost: Lost, position: Position, durable: bool) -> None:
        """A number that never arrived counts as an operation that failed, in its accumulation window too."""
        stream = self.streams.get(lost.stream)
        if stream is None:
            raise ValueError(f"{request_id(lost.stream, lost.seq)} was given up, but nothing waited for it")
        model = self.models.get(lost.stream)
        step = 0 if model is None else model.step
        result = Result(lost.stream, lost.seq, False, JSON, step, lost.error, "user")
        args = Refused(ForwardBackward.KIND, lost.error)
        entry = Entry(lost.stream, lost.seq, args, position, durable, Ended(result, position))
        stream.lose(entry)
        self._take_effect(entry, result)

    def _stream(self, name: str, seq: int) -> Stream:
        stream = self.streams.get(name)
        if stream is None or seq not in stream.entries:
            raise ValueError(f"{request_id(name, seq)} has a record but was never accepted")
        return stream

    def info(self, model_id: str) -> ModelInfo | None:
        """A model whose creation succeeded, whether it goes on or was rolled back; also what holds a copy only."""
        model, closed = self.models.get(model_id), self._closed(model_id)
        if closed is not None:
            return ModelInfo(model_id, closed.base_model, closed.lora)
        return None if model is None else model.info

    def closed(self, stream: str) -> str | None:
        """What all operations of a stream are answered in which none runs; None for any other."""
        closed = self._closed(stream)
        return None if closed is None else closed.explanation

    def _closed(self, stream: str) -> RolledBack | CopiedRun | None:
        return self.rolled_back.get(stream) or self.copied.get(stream)

    def needs_file(self, model_id: str, key: str) -> bool:
        """Whether a checkpoint is left whose file lies there: what it was stored as, or a copy."""
        copies = (run for run in self.copied.values() if (run.holder, run.key) == (model_id, key))
        return any(_frozen(each, key) in self.frozen for each in (model_id, *(run.run_id for run in copies)))

    def find(self, request: str) -> Entry | Kept | Gone | None:
        """What is known of the operation of a request id; None if none was accepted."""
        parts = split_request_id(request)
        stream = self.streams.get(parts[0]) if parts else None
        if parts is None or stream is None:
            return None
        entry = stream.entries.get(parts[1])
        if entry is not None:
            return entry
        offset = stream.owed.find(parts[1])
        if offset is not None:
            return Kept(stream.owed.base, offset)
        return Gone() if parts[1] in stream.gone else None

    def entry(self, request: str) -> Entry | None:
        """The accepted operation of a request id, unless only its result is kept."""
        found = self.find(request)
        return found if isinstance(found, Entry) else None

    def _take_effect(self, entry: Entry, result: Result) -> None:
        args = entry.args
        if isinstance(args, CreateModel) and result.ok and entry.seq == CREATION:
            if args.seed is None:
                raise ValueError(f"{entry.request_id} was accepted without a seed")
            lora = Lora(args.rank, args.seed, args.train_mlp, args.train_attn, args.train_unembed)
            self.models[entry.stream] = Model(ModelInfo(entry.stream, args.base_model, lora, args.user_metadata))
        if isinstance(args, LoadWeights) and result.loaded is not None:
            self._load(entry, args, result.loaded)
        model = self.models.get(entry.stream)
        if model is None:
            return
        model.step = result.step
        assert entry.ended is not None, "its result is what takes effect"
        finished = _finished(entry, entry.ended)
        if closes_window(finished):
            model.window.clear()
        elif is_failure(finished) or added_gradients(finished):
            model.window.append(entry.seq)
        if result.stored is not None:
            self._take_checkpoint(model, entry, result.stored)

    def _load(self, entry: Entry, args: LoadWeights, loaded: Loaded) -> None:
        source = self.frozen.get(loaded.source)
        if source is None:
            raise ValueError(f"{entry.request_id} loaded {loaded.source!r}, which was never stored")
        made = self.info(source.model_id)
        if made is None:
            raise ValueError(f"{entry.request_id} loaded {loaded.source!r} of a model that was never created")
        model = self.models.get(entry.stream)
        if model is None:
            model = Model(ModelInfo(entry.stream, made.base_model, source.lora, args.user_metadata))
            self.models[entry.stream] = model
        model.info = replace(model.info, lora=source.lora)
        model.root = loaded.snapshot

    def _take_checkpoint(self, model: Model, entry: Entry, stored: Stored) -> None:
        args = entry.args
        if not isinstance(args, Save):
            raise ValueError(f"{entry.request_id} stored weights but is a {args.KIND}")
        ttl = args.ttl_seconds
        # Versions that did not expire anything accepted any number here.
        expires = None if ttl is None or refuse_ttl(ttl) is not None else after(stored.time, ttl)
        lora, metadata = model.info.lora, args.user_metadata
        checkpoint = Checkpoint(entry.stream, args.name, model.step, lora, stored, metadata, expires)
        self._list(model, checkpoint)
        if not isinstance(args, SaveWeightsForSampler):
            return
        if args.kind == "inflight":
            self.inflight[entry.stream] = checkpoint.frozen
        if args.sampling_session_seq_id is not None:
            sampler = sampling_session_id(session_of(entry.stream), args.sampling_session_seq_id)
            self.samplers[sampler] = SamplerInfo(sampler, entry.stream, args.kind, checkpoint.frozen)

    def weights_of_sampler(self, sampler: str) -> str | None:
        """The `frozen:` name that a sample accepted now uses: an inflight session follows newer inflight saves."""
        info = self.samplers.get(sampler)
        if info is None:
            return None
        return self.inflight[info.model_id] if info.kind == "inflight" else info.weights

    def window(self, model_id: str) -> list[Finished]:
        """What matters of a model's open accumulation window: failures and what added gradients, in order."""
        entries = self.streams[model_id].entries
        window = [entries[seq] for seq in self.models[model_id].window]
        return [_finished(entry, entry.ended) for entry in window if entry.ended is not None]

    def unfinished(self) -> int:
        """How many accepted operations have no result."""
        return sum(len(stream.pending) for stream in self.streams.values())


def _frozen(model_id: str, key: str) -> str:
    return f"{FROZEN}{storage_id(model_id)}/{key}"


def _finished(entry: Entry, ended: Ended) -> Finished:
    result, at = ended.result, ended.position
    return Finished(entry.seq, entry.args, result.ok, result.gradients_dropped, entry.accepted, at, entry.delivered)
