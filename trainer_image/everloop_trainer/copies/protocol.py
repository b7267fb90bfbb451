"""What server and copier tell each other, as JSON lines: the whole set of what is wanted, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ConfigDict, TypeAdapter, with_config

from everloop_trainer.session.status import CopiesReport

STRICT = ConfigDict(extra="forbid")


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SharedFile:
    """What a checkpoint says of itself whose data lies in the directory of the model `holder`, and in none of its own.

    `model_id`, `source` and `time` as in its manifest.
    """

    holder: str
    model_id: str
    source: str
    time: str


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class State:
    """A stored state, by the directory that it lies in: always there in S3, and here unless its data is shared."""

    kind: str
    model: str
    key: str
    shared: SharedFile | None = field(default=None, compare=False)


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Wanted:
    """States that are to have a copy; of `models`, by the names of their directories, nothing else is.

    `last`: the pod is about to end. Nothing is put off any more, and each copy is tried once.
    """

    states: tuple[State, ...] = ()
    models: tuple[str, ...] = ()
    last: bool = False


WANTED: TypeAdapter[Wanted] = TypeAdapter(Wanted)
REPORT: TypeAdapter[CopiesReport] = TypeAdapter(CopiesReport)
