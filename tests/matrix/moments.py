"""Which moment of an operation the journal shows. Pure.

A kill counts for a moment only if what the journal and the volume held at that instant says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Key = tuple[str, int]
"""An operation: its stream and its number there."""


class Moment(StrEnum):
    """When a kill falls, by the name that the loop gives it; the order is the loop's."""

    CREATE_MODEL = "create_model"
    ACCEPTED = "accepted"
    """A forward_backward is in the journal, who sent it has no acknowledgement yet: it is sent again."""
    FORWARD_BACKWARD = "forward_backward"
    BETWEEN_CHUNKS = "between_chunks"
    """The first chunk of a forward_backward has its result, the last has none."""
    BETWEEN_PASS_AND_STEP = "between_pass_and_step"
    """A forward_backward was told of, its optim_step has not been sent."""
    SAMPLE = "sample"
    BEFORE_MANIFEST = "before_manifest"
    """During save_state, before its checkpoint counts."""
    AFTER_MANIFEST = "after_manifest"
    """During save_state: its checkpoint counts, its result is not in the journal."""
    OPTIM_STEP = "optim_step"
    LOAD_STATE = "load_state"
    IDLE = "idle"
    CREATION = "creation"
    """A TrainingSession was made for a client that asked for a model, and the client has no answer yet."""


OF_THE_LOOP = tuple(moment for moment in Moment if moment != Moment.CREATION)
"""Those that a loop passes through in each of its rounds; a creation has a client of its own."""


QUIET = frozenset({Moment.BETWEEN_PASS_AND_STEP, Moment.IDLE})
"""Moments in which nothing is under way."""

KINDS: Mapping[Moment, str] = {
    Moment.CREATE_MODEL: "create_model",
    Moment.ACCEPTED: "forward_backward",
    Moment.FORWARD_BACKWARD: "forward_backward",
    Moment.BETWEEN_CHUNKS: "forward_backward",
    Moment.SAMPLE: "sample",
    Moment.BEFORE_MANIFEST: "save_weights",
    Moment.AFTER_MANIFEST: "save_weights",
    Moment.OPTIM_STEP: "optim_step",
    Moment.LOAD_STATE: "load_weights",
}
"""The kind of operation, in the journal's words, that is under way in a moment."""


@dataclass
class Facts:
    """What a journal says of its operations, in order of acceptance."""

    kinds: dict[Key, str] = field(default_factory=dict)
    accepts: Counter[Key] = field(default_factory=Counter)
    tries: Counter[Key] = field(default_factory=Counter)
    results: Counter[Key] = field(default_factory=Counter)
    failures: dict[Key, str] = field(default_factory=dict)
    last_result: Key | None = None
    incarnation: int = 0
    attempt: int = 0

    def unfinished(self) -> list[Key]:
        """Operations that were accepted and have no result."""
        return [key for key in self.kinds if not self.results[key]]


def gather(records: Iterable[Mapping[str, Any]]) -> Facts:
    """The facts of a journal dump."""
    facts = Facts()
    for record in records:
        key = (record.get("s", ""), record["n"])
        match record["t"]:
            case "open":
                facts.incarnation, facts.attempt = record["n"], record["attempt"]
            case "accept":
                facts.kinds[key] = record["k"]
                facts.accepts[key] += 1
            case "try":
                facts.tries[key] += 1
            case "result":
                facts.results[key] += 1
                facts.last_result = key
                if not record["ok"]:
                    facts.failures[key] = record["err"]
    return facts


def news(moment: Moment, facts: Facts, known: Collection[Key]) -> list[Key]:
    """The operations of the moment's kind that were accepted since `known`, by number."""
    return sorted(key for key, kind in facts.kinds.items() if kind == KINDS.get(moment) and key not in known)


def has_begun(moment: Moment, facts: Facts, known: Collection[Key]) -> bool:
    """Whether the moment's operation was handed to an engine, and all chunks of it were accepted."""
    keys = news(moment, facts, known)
    chunks = 2 if moment == Moment.BETWEEN_CHUNKS else 1
    return len(keys) >= chunks and facts.tries[keys[0]] > 0


def falls_in(moment: Moment, facts: Facts, known: Collection[Key], manifests: Collection[str]) -> bool:
    """Whether this is the moment.

    Args:
        moment: the one that is wanted.
        facts: the journal at this instant.
        known: what was accepted before the loop came to the moment.
        manifests: request ids of the operations that a checkpoint on the volume names.
    """
    if moment in QUIET:
        if facts.unfinished() or facts.last_result is None:
            return False
        return moment == Moment.IDLE or facts.kinds[facts.last_result] == "forward_backward"
    keys = news(moment, facts, known)
    if moment == Moment.BETWEEN_CHUNKS:
        return len(keys) >= 2 and bool(facts.results[keys[0]]) and not facts.results[keys[-1]]
    if moment == Moment.ACCEPTED:  # it is offered to the engine at the same time as it is acknowledged
        return len(keys) == 1 and not facts.tries[keys[0]]
    if len(keys) != 1 or not facts.tries[keys[0]] or facts.results[keys[0]]:
        return False
    stored = f"{keys[0][0]}:{keys[0][1]}" in manifests
    return stored == (moment == Moment.AFTER_MANIFEST)


def flaws(facts: Facts, manifests: Iterable[str]) -> list[str]:
    """What of a finished loop's operations did not happen exactly once; `manifests` as for `falls_in`."""
    found = [f"{key} was accepted {times} times" for key, times in facts.accepts.items() if times != 1]
    found += [f"{key} has {facts.results[key]} results" for key in facts.kinds if facts.results[key] != 1]
    found += [f"{request} was stored {times} times" for request, times in Counter(manifests).items() if times != 1]
    return found + [f"{key} failed: {error}" for key, error in facts.failures.items()]
