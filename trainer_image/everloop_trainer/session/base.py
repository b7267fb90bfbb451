"""A base: the facts of a history in short, as they are stored in place of its records. Pure.

What is left of a history when everything is left out that nobody can ask for any more: of a model the operations that
changed it since the oldest snapshot that it may be restored from; of other operations that have ended their results, as
long as they are promised; of those whose results are gone, only their numbers.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from everloop_trainer.session.copied import CopiedRun
from everloop_trainer.session.history import Checkpoint, Handled, History, Model, ModelInfo, SamplerInfo
from everloop_trainer.session.identifiers import CREATION
from everloop_trainer.session.numbers import Numbers, Range
from everloop_trainer.session.operations import arguments_from_json, arguments_to_json
from everloop_trainer.session.poison import Tries
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import Lost, Result
from everloop_trainer.session.recovery import matters
from everloop_trainer.session.rollback import RolledBack
from everloop_trainer.session.streams import Ended, Entry, Owed, Stream

STRICT = ConfigDict(extra="forbid")
_T = TypeVar("_T")


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model, as history.Model; checkpoints that were pruned are not in it."""

    info: ModelInfo
    step: int
    window: tuple[int, ...]
    latest_checkpoint: Checkpoint | None
    root: str | None
    automatic: tuple[Checkpoint, ...]
    inflight: str | None


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What belongs to no single stream.

    Attributes:
        format: of the base.
        lengths: by incarnation: bytes of its journal that count, as far as the base stands for them.
        models: in the order of their creation.
        frozen: every checkpoint.
        listed: paths and the `frozen:` names that they mean.
        samplers: in the order of their creation.
        rolled_back: models that ended with the storage that they were on.
        handled: calls that changed checkpoints, and of which a repeat may come.
        copied: training runs that hold a copy, in the order of their creation.
    """

    format: int
    lengths: dict[int, int]
    models: tuple[ModelFacts, ...]
    frozen: tuple[Checkpoint, ...]
    listed: tuple[tuple[str, str], ...]
    samplers: tuple[SamplerInfo, ...]
    rolled_back: tuple[RolledBack, ...] = ()
    handled: tuple[Handled, ...] = ()
    copied: tuple[CopiedRun, ...] = ()


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class EntryFacts:
    """An operation, as streams.Entry, and where in the base its records lie; 0 for those that it has not.

    `args` is JSON text. Of a number that was given up the two records are one.
    """

    seq: int
    kind: str
    args: str
    accepted: Position
    accepted_at: int
    result: Result | None
    ended: Position | None
    ended_at: int
    delivered: Position | None
    tries_weight: int
    tried_by: int


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream, as streams.Stream; the results that it owes are listed beside it (`pack_owed`).

    `rolled_back` is what a stream calls `closed`: the key in the file is that of the first case that there was.
    """

    name: str
    done: int
    floor: int
    last_request: str
    gone: tuple[Range, ...]
    fetched: tuple[Range, ...]
    entries: tuple[EntryFacts, ...]
    rolled_back: bool = False
    first_request: str = ""


@dataclass(frozen=True, slots=True)
class Base:
    """A whole base; `owed` by stream. `moved` tells where in it the records of its entries lie."""

    facts: SessionFacts
    streams: tuple[StreamFacts, ...]
    owed: Mapping[str, Owed]

    @property
    def moved(self) -> dict[Position, int]:
        """By position: the offset in the base of the record that had been written there."""
        moved: dict[Position, int] = {}
        for stream in self.streams:
            for entry in stream.entries:
                if entry.accepted_at:
                    moved[entry.accepted] = entry.accepted_at
                if entry.ended is not None and entry.ended_at:
                    moved[entry.ended] = entry.ended_at
        return moved


@dataclass(frozen=True, slots=True)
class Cut:
    """What is left of one stream.

    Attributes:
        kept: entries that stay as they are.
        ended: entries of which the result is left, by number.
        gone: numbers whose results are kept no more.
    """

    stream: Stream
    floor: int
    kept: tuple[Entry, ...]
    ended: tuple[tuple[int, Position], ...]
    gone: Numbers

    def owed(self) -> Iterator[tuple[int, Position | int]]:
        """Numbers, ascending, with the place of their result: where it was written, or its offset in the older base."""
        older = zip(self.stream.owed.numbers, self.stream.owed.offsets, strict=True)
        kept: Iterator[tuple[int, Position | int]] = (pair for pair in older if pair[0] not in self.gone)
        return merge(kept, self.ended, key=lambda pair: pair[0])


def cut(history: History, floors: Mapping[str, int], expired: Mapping[str, Numbers]) -> Iterator[Cut]:
    """What is to be left of each stream of a history.

    Args:
        history: all facts, as they are at one moment.
        floors: by model: the number of the oldest snapshot that it may be restored from; 0 or none: all is kept.
        expired: by stream: numbers whose results were fetched long enough ago.
    """
    for stream in history.streams.values():
        model = history.models.get(stream.name)
        floor = max(stream.floor, floors.get(stream.name, 0))
        if model is None and stream.ordered:
            floor = max(0, stream.done - 1)  # it was never created: nothing will ever be restored
        old = expired.get(stream.name, Numbers())
        needed = {CREATION, stream.done - 1, *(model.window if model is not None else ())}
        kept, ended, gone = [], [], Numbers(stream.gone.ranges())
        for seq in stream.owed.numbers if old else ():
            if seq in old:
                gone.add(seq)
        for entry in stream.entries.values():
            replayed = entry.seq >= floor and matters(entry)
            if entry.ended is None or (stream.ordered and (replayed or entry.seq in needed)):
                kept.append(entry)
            elif entry.seq in old:
                gone.add(entry.seq)
            else:
                ended.append((entry.seq, entry.ended.position))
        yield Cut(stream, floor, tuple(kept), tuple(sorted(ended)), gone)


def session_facts(history: History, lengths: Mapping[int, int]) -> SessionFacts:
    """The facts of a history that belong to no single stream."""
    models = tuple(
        ModelFacts(
            model.info,
            model.step,
            tuple(model.window),
            model.latest_checkpoint,
            model.root,
            tuple(model.automatic.values()),
            history.inflight.get(name),
        )
        for name, model in history.models.items()
    )
    listed = tuple((path, checkpoint.frozen) for path, checkpoint in history.checkpoints.items())
    frozen, samplers = tuple(history.frozen.values()), tuple(history.samplers.values())
    lost, handled = tuple(history.rolled_back.values()), tuple(history.handled.values())
    copied = tuple(history.copied.values())
    return SessionFacts(FORMAT, dict(lengths), models, frozen, listed, samplers, lost, handled, copied)


def stream_facts(history: History, left: Cut, places: Mapping[Position, int]) -> StreamFacts:
    """The facts of a stream; `places` tells where in the base the records of what is kept were copied to."""
    stream = left.stream
    entries = tuple(
        EntryFacts(
            seq=entry.seq,
            kind=entry.args.KIND,
            args=json.dumps(arguments_to_json(entry.args), separators=(",", ":")),
            accepted=entry.accepted,
            accepted_at=places.get(entry.accepted, 0),
            result=None if entry.ended is None else entry.ended.result,
            ended=None if entry.ended is None else entry.ended.position,
            ended_at=0 if entry.ended is None else places.get(entry.ended.position, 0),
            delivered=entry.delivered,
            tries_weight=entry.tries.weight,
            tried_by=entry.tries.incarnation,
        )
        for entry in left.kept
    )
    last_request, first_request = history.last_request.get(stream.name, ""), history.first_request.get(stream.name, "")
    gone, fetched = left.gone.ranges(), stream.fetched.without(left.gone).ranges()
    return StreamFacts(
        name=stream.name,
        done=stream.done,
        floor=left.floor,
        last_request=last_request,
        gone=gone,
        fetched=fetched,
        entries=entries,
        rolled_back=stream.closed,
        first_request=first_request,
    )


def restore(base: Base) -> History:
    """The history that a base stands for. Raises ValueError if the base contradicts itself."""
    history, facts = History(), base.facts
    history.frozen = {checkpoint.frozen: checkpoint for checkpoint in facts.frozen}
    history.checkpoints = {path: history.frozen[frozen] for path, frozen in facts.listed}
    history.samplers = {sampler.sampling_session_id: sampler for sampler in facts.samplers}
    history.rolled_back = {model.model_id: model for model in facts.rolled_back}
    history.copied = {run.run_id: run for run in facts.copied}
    history.handled = {(call.path, call.request): call for call in facts.handled}
    for known in facts.models:
        name = known.info.model_id
        automatic = {checkpoint.stored.key: checkpoint for checkpoint in known.automatic}
        history.models[name] = Model(
            known.info, known.step, list(known.window), known.latest_checkpoint, known.root, automatic
        )
        if known.inflight is not None:
            history.inflight[name] = known.inflight
    for stream in base.streams:
        history.streams[stream.name] = _restore_stream(stream, base.owed[stream.name])
        if stream.last_request:
            history.last_request[stream.name] = stream.last_request
        if stream.first_request:
            history.first_request[stream.name] = stream.first_request
    return history


def _restore_stream(facts: StreamFacts, owed: Owed) -> Stream:
    stream = Stream(facts.name, done=facts.done, floor=facts.floor, owed=owed, closed=facts.rolled_back)
    stream.gone, stream.fetched = Numbers(facts.gone), Numbers(facts.fetched)
    for known in facts.entries:
        entry = Entry(
            stream=facts.name,
            seq=known.seq,
            args=arguments_from_json(known.kind, json.loads(known.args)),
            accepted=known.accepted,
            durable=True,
            ended=None if known.result is None or known.ended is None else Ended(known.result, known.ended),
            delivered=known.delivered,
            tries=Tries(known.tries_weight, known.tried_by),
        )
        stream.entries[entry.seq] = entry
    unfinished = sorted(
        (each for each in stream.entries.values() if each.ended is None), key=lambda each: each.accepted
    )
    stream.pending = {entry.seq: entry for entry in unfinished}
    return stream


FORMAT = 1
_SESSION = TypeAdapter(SessionFacts)
_STREAM = TypeAdapter(StreamFacts)


def to_json(facts: SessionFacts | StreamFacts) -> bytes:
    """The facts as JSON text, without what has its default: an older version need not know what is not used."""
    if isinstance(facts, StreamFacts):
        return _STREAM.dump_json(facts, exclude_defaults=True)
    return _SESSION.dump_json(facts, exclude_defaults=True)


def session_from_json(text: bytes) -> SessionFacts:
    """The facts that `to_json` wrote. Raises ValueError naming what is wrong."""
    facts = _validated(_SESSION, text)
    if facts.format != FORMAT:
        raise ValueError(f"format: {facts.format} is newer than {FORMAT}, which this version reads")
    return facts


def stream_from_json(text: bytes) -> StreamFacts:
    """The facts that `to_json` wrote. Raises ValueError naming what is wrong."""
    return _validated(_STREAM, text)


def _validated(adapter: TypeAdapter[_T], text: bytes) -> _T:
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error


def pack_owed(owed: Owed) -> bytes:
    """Numbers, then offsets, each as 64 bits in the byte order of x86-64."""
    return owed.numbers.tobytes() + owed.offsets.tobytes()


def unpack_owed(base: str, packed: bytes) -> Owed:
    """What `pack_owed` made. Raises ValueError if it cannot have."""
    if len(packed) % 16:
        raise ValueError(f"owed: {len(packed)} bytes are no list of numbers and offsets")
    numbers, offsets = array("Q"), array("Q")
    numbers.frombytes(packed[: len(packed) // 2])
    offsets.frombytes(packed[len(packed) // 2 :])
    return Owed(base, numbers, offsets)


def given_up(record: Lost) -> Result:
    """The result of a number that never arrived, of which only its record is left."""
    return Result(record.stream, record.seq, False, "application/json", 0, record.error, "user")
