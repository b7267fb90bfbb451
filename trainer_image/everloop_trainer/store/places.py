"""Where each record of the history lies: in which file, at which byte. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from everloop_trainer.session.base import Base
from everloop_trainer.session.ports import Position
from everloop_trainer.session.records import BaseSeal, Seal
from everloop_trainer.store import layout


@dataclass(frozen=True, slots=True)
class Lineage:
    """The history in files: a base, if there is one, and what was sealed behind it, in order."""

    base: BaseSeal | None
    seals: tuple[Seal, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A record's file, its offset there, and how much of that file counts."""

    path: str
    offset: int
    limit: int


@dataclass(frozen=True, slots=True)
class Part:
    """One file of an incarnation's journal, which begins at byte `start` of that journal."""

    path: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Places:
    """The files of the history.

    Attributes:
        lengths: by incarnation: bytes of its journal that count.
        parts: by incarnation: the files that are there, in order.
        base: the base before those files, if there is one.
        moved: by position: the offset in the base of a record whose file is no more.
    """

    lengths: Mapping[int, int] = field(default_factory=dict)
    parts: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    base: BaseSeal | None = None
    moved: Mapping[Position, int] = field(default_factory=dict)

    def find(self, position: Position) -> Place | None:
        """Where the record of a position lies; None if that is nowhere any more."""
        for part in self.parts.get(position.incarnation, ()):
            if part.start <= position.offset < part.start + part.length:
                return Place(part.path, position.offset - part.start, part.length)
        offset = self.moved.get(position)
        return None if offset is None else self.kept(offset)

    def kept(self, offset: int) -> Place | None:
        """Where a record of the base lies."""
        return None if self.base is None else Place(base_path(self.base), offset, self.base.facts)

    def add(self, seal: Seal) -> Places:
        """With one more file behind those that there are."""
        number = seal.incarnation
        start = self.lengths.get(number, 0)
        part = Part(layout.journal(number, seal.segment), start, seal.length)
        return replace(
            self,
            lengths={**self.lengths, number: start + seal.length},
            parts={**self.parts, number: (*self.parts.get(number, ()), part)},
        )


def places_of(lineage: Lineage, base: Base | None) -> Places:
    """The places of a history; `base` is the one that the lineage names."""
    places = Places() if base is None else Places(base.facts.lengths, {}, lineage.base, base.moved)
    for seal in lineage.seals:
        places = places.add(seal)
    return places


def base_path(base: BaseSeal) -> str:
    """The file of a base."""
    return layout.base(layout.Cut(base.incarnation, base.segment))
