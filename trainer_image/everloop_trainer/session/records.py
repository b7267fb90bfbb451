"""Records of the journal: typed values and their JSON headers. Bodies travel beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from everloop_trainer.session.errors import Category
from everloop_trainer.session.numbers import Range
from everloop_trainer.session.operations import Arguments, arguments_from_json, arguments_to_json
from everloop_trainer.session.outcomes import ContentType
from everloop_trainer.session.rollback import RolledBack

STRICT = ConfigDict(extra="forbid")


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Seal:
    """How much of an older journal file counts for ever: its first `length` bytes, which have this SHA-256.

    `segment` counts the files of one incarnation, from 0. The hash leaves out the ranges of bytes in `damaged`: there
    lay records whose bodies were damaged when the file was sealed, and what they had been before, nobody knows.
    """

    incarnation: int
    length: int
    sha256: str
    segment: int = 0
    damaged: tuple[Range, ...] = ()


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class BaseSeal:
    """The base that stands for everything before segment `segment` of incarnation `incarnation`.

    `length` in bytes, with this SHA-256; its facts begin at byte `facts`, before them lie records for single reads.
    """

    incarnation: int
    segment: int
    length: int
    sha256: str
    facts: int


@dataclass(frozen=True, slots=True)
class Open:
    """First record of a journal file: who writes it and which history it stands on. `time` is RFC 3339.

    The history is `base`, if there is one, and behind it the files of `seals`. `start` is the offset of this file's
    first byte in the incarnation's journal, of which it is segment `segment`.
    """

    number: int
    attempt: int
    boot: int
    pod: str
    seals: tuple[Seal, ...]
    time: str
    segment: int = 0
    start: int = 0
    base: BaseSeal | None = None


@dataclass(frozen=True, slots=True)
class Accept:
    """An operation was accepted; seeds are resolved in its arguments. The body is the operation's body."""

    stream: str
    seq: int
    args: Arguments
    time: str


@dataclass(frozen=True, slots=True)
class Try:
    """An engine is about to start an operation."""

    stream: str
    seq: int
    engine: int


CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Stored:
    """The checkpoint that a save operation stored: its manifest in the words that later operations need."""

    kind: CheckpointKind
    key: str
    sha256: str
    size: int
    time: str


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load_weights loaded, by its `frozen:` name, and the key of the snapshot that the model stands on since."""

    source: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class Result:
    """An operation ended. The body is the result as it is delivered; empty for a failure.

    `step` is the model's number of optimizer steps after it. `gradients_dropped` marks an optim_step that failed
    because its accumulation window held a failure: replay clears the gradients too.
    """

    stream: str
    seq: int
    ok: bool
    content_type: ContentType
    step: int
    error: str | None = None
    category: Category | None = None
    gradients_dropped: bool = False
    stored: Stored | None = None
    loaded: Loaded | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """The client is about to be told of a failure."""

    stream: str
    seq: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A number of a model never arrived and was given up; `error` is what its client is told if it comes after all."""

    stream: str
    seq: int
    error: str


@dataclass(frozen=True, slots=True)
class Autosaved:
    """An automatic checkpoint of a model was stored, after its operation `seq`; `step` counts optimizer steps."""

    stream: str
    seq: int
    name: str
    step: int
    stored: Stored


@dataclass(frozen=True, slots=True)
class Pruned:
    """An automatic checkpoint of a model, by its key, is no more."""

    stream: str
    key: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A named checkpoint of a model, by its key, is listed no more, and nothing that is accepted from now on finds it.

    `request` is the idempotency key of whoever asked for that; empty if the checkpoint expired. `time` is RFC 3339.
    """

    stream: str
    key: str
    time: str
    request: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A checkpoint that is listed no more is needed by nothing: its file may go."""

    stream: str
    key: str


@dataclass(frozen=True, slots=True)
class Amended:
    """What holds of a named checkpoint from now on: when it expires (RFC 3339, None for never), and who may read it.

    `public`: every key of the namespace, not its owner's alone. `time` and `request` as in Removed.
    """

    stream: str
    key: str
    time: str
    request: str
    expires: str | None
    public: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """The training run `run` was made, and has a checkpoint: a copy of a model's named one, by its key.

    Both are one file. `expires` as in Amended, of the copy; `time` is RFC 3339.
    """

    stream: str
    key: str
    run: str
    time: str
    expires: str | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Results of a stream were handed out to somebody who asked; `numbers` as ranges."""

    stream: str
    numbers: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """The storage was lost, and this is what its copies say of a model."""

    model: RolledBack


Record = (
    Open
    | Accept
    | Try
    | Result
    | Deliver
    | Lost
    | Autosaved
    | Pruned
    | Removed
    | Dropped
    | Amended
    | Copied
    | Fetched
    | Restored
)


def to_header(record: Record) -> dict[str, Any]:
    """The record's header as JSON values; `t` names its type."""
    match record:
        case Open():
            return {
                "t": "open",
                "n": record.number,
                "attempt": record.attempt,
                "boot": record.boot,
                "pod": record.pod,
                "seals": [_SEAL.dump_python(seal, mode="json") for seal in record.seals],
                "time": record.time,
                "segment": record.segment,
                "start": record.start,
                "base": None if record.base is None else _BASE_SEAL.dump_python(record.base, mode="json"),
            }
        case Accept():
            return {
                "t": "accept",
                "s": record.stream,
                "n": record.seq,
                "k": record.args.KIND,
                "time": record.time,
                "a": arguments_to_json(record.args),
            }
        case Try():
            return {"t": "try", "s": record.stream, "n": record.seq, "engine": record.engine}
        case Deliver():
            return {"t": "deliver", "s": record.stream, "n": record.seq}
        case Lost():
            return {"t": "lost", "s": record.stream, "n": record.seq, "err": record.error}
        case Autosaved():
            return {
                "t": "autosaved",
                "s": record.stream,
                "n": record.seq,
                "name": record.name,
                "step": record.step,
                "stored": _STORED.dump_python(record.stored, mode="json"),
            }
        case Pruned():
            return {"t": "pruned", "s": record.stream, "n": 0, "key": record.key}
        case Removed():
            asked = {"time": record.time, "request": record.request}
            return {"t": "removed", "s": record.stream, "n": 0, "key": record.key, **asked}
        case Dropped():
            return {"t": "dropped", "s": record.stream, "n": 0, "key": record.key}
        case Amended():
            asked = {"time": record.time, "request": record.request}
            holds = {"expires": record.expires, "public": record.public}
            return {"t": "amended", "s": record.stream, "n": 0, "key": record.key, **asked, **holds}
        case Copied():
            made = {"run": record.run, "time": record.time, "expires": record.expires}
            return {"t": "copied", "s": record.stream, "n": 0, "key": record.key, **made}
        case Fetched():
            return {"t": "fetched", "s": record.stream, "n": 0, "numbers": [list(each) for each in record.numbers]}
        case Restored():
            model = record.model
            return {"t": "restored", "s": model.model_id, "n": 0, "model": _ROLLED_BACK.dump_python(model, mode="json")}
        case Result():
            header: dict[str, Any] = {
                "t": "result",
                "s": record.stream,
                "n": record.seq,
                "ok": record.ok,
                "ctype": record.content_type,
                "step": record.step,
            }
            if not record.ok:
                header |= {"err": record.error, "category": record.category, "dropped": record.gradients_dropped}
            if record.stored is not None:
                header["stored"] = _STORED.dump_python(record.stored, mode="json")
            if record.loaded is not None:
                header["loaded"] = {"source": record.loaded.source, "snapshot": record.loaded.snapshot}
            return header


def is_readable(record: Record) -> bool:
    """Whether a later incarnation could read this record: not so half of a surrogate pair, or what nests too deeply."""
    try:
        from_header(json.dumps(to_header(record)).encode())
    except ValueError:
        return False
    return True


_STORED = TypeAdapter(Stored)
_SEAL = TypeAdapter(Seal)
_ROLLED_BACK = TypeAdapter(RolledBack)
_BASE_SEAL = TypeAdapter(BaseSeal)


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class _Header:
    """Every key that a header may hold, by type; `from_header` asks for those that its type needs."""

    t: Literal[
        "open",
        "accept",
        "try",
        "result",
        "deliver",
        "lost",
        "autosaved",
        "pruned",
        "removed",
        "dropped",
        "amended",
        "copied",
        "fetched",
        "restored",
    ]
    n: int
    s: str | None = None
    k: str | None = None
    a: dict[str, Any] | None = None
    time: str | None = None
    attempt: int | None = None
    boot: int | None = None
    pod: str | None = None
    seals: tuple[Seal, ...] | None = None
    engine: int | None = None
    ok: bool | None = None
    ctype: ContentType | None = None
    step: int | None = None
    err: str | None = None
    category: Category | None = None
    dropped: bool = False
    stored: Stored | None = None
    loaded: Loaded | None = None
    name: str | None = None
    key: str | None = None
    request: str | None = None
    run: str | None = None
    expires: str | None = None
    public: bool | None = None
    segment: int = 0
    start: int = 0
    base: BaseSeal | None = None
    numbers: tuple[Range, ...] | None = None
    model: RolledBack | None = None

    def need(self, *keys: str) -> list[Any]:
        values = [getattr(self, key) for key in keys]
        for key, value in zip(keys, values, strict=True):
            if value is None:
                raise ValueError(f"{self.t}.{key}: missing")
        return values


_HEADER = TypeAdapter(_Header)


def from_header(header: bytes) -> Record:
    """The record of a header's JSON text.

    Raises:
        ValueError: names the key that is missing, unknown or of the wrong type.
    """
    try:
        found = _HEADER.validate_json(header, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"record header key {key or '?'}: {first['msg']}") from error
    match found.t:
        case "open":
            attempt, boot, pod, seals, time = found.need("attempt", "boot", "pod", "seals", "time")
            return Open(found.n, attempt, boot, pod, seals, time, found.segment, found.start, found.base)
        case "accept":
            stream, kind, values, time = found.need("s", "k", "a", "time")
            return Accept(stream, found.n, arguments_from_json(kind, values), time)
        case "try":
            stream, engine = found.need("s", "engine")
            return Try(stream, found.n, engine)
        case "deliver":
            (stream,) = found.need("s")
            return Deliver(stream, found.n)
        case "autosaved":
            stream, name, step, stored = found.need("s", "name", "step", "stored")
            return Autosaved(stream, found.n, name, step, stored)
        case "pruned":
            stream, key = found.need("s", "key")
            return Pruned(stream, key)
        case "removed":
            stream, key, time, request = found.need("s", "key", "time", "request")
            return Removed(stream, key, time, request)
        case "dropped":
            stream, key = found.need("s", "key")
            return Dropped(stream, key)
        case "amended":
            stream, key, time, request, public = found.need("s", "key", "time", "request", "public")
            return Amended(stream, key, time, request, found.expires, public)
        case "copied":
            stream, key, run, time = found.need("s", "key", "run", "time")
            return Copied(stream, key, run, time, found.expires)
        case "fetched":
            stream, numbers = found.need("s", "numbers")
            return Fetched(stream, numbers)
        case "restored":
            (model,) = found.need("model")
            return Restored(model)
        case "lost":
            stream, told = found.need("s", "err")
            return Lost(stream, found.n, told)
        case "result":
            stream, ok, content_type, step = found.need("s", "ok", "ctype", "step")
            if not ok:
                found.need("err", "category")
            return Result(
                stream,
                found.n,
                ok,
                content_type,
                step,
                found.err,
                found.category,
                found.dropped,
                found.stored,
                found.loaded,
            )
