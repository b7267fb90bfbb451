"""What a node's labels, taints, conditions and devices say about its health, by rules that an installation chooses.

A rule names a signal of one platform and says how bad it is. The rules are the same for every platform: a profile of
the chart is nothing but a list of them. An absent signal says nothing: it makes no node unhealthy (only the kind
Missing asks for a presence), and none healthy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from everloop_operator.api.schema import ApiModel

Body = Mapping[str, Any]


class Severity(StrEnum):
    """What is to be done about a signal, in ascending order of haste."""

    AVOID = "Avoid"
    """New pods prefer other nodes; a pod that runs there stays."""
    CHECKPOINT_THEN_MOVE = "CheckpointThenMove"
    """The pod writes its snapshots first, then another takes over elsewhere."""
    MOVE_NOW = "MoveNow"
    """Another pod takes over elsewhere at once."""

    @property
    def moves(self) -> bool:
        """Whether a pod has to leave."""
        return self is not Severity.AVOID

    @property
    def rank(self) -> int:
        """Greater is more urgent."""
        return list(Severity).index(self)


class NodeRule(ApiModel):
    """One signal, and how bad it is."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    """Shown in status, events and metrics; a later rule of the same name replaces an earlier one."""
    kind: Literal["Label", "Taint", "Condition", "Unschedulable", "Allocatable", "Missing"]
    """Where the signal is: a label, a taint's key, a condition's type, `spec.unschedulable`, an extended resource
    whose allocatable amount is below the capacity, or a label that should be there and is not."""
    key: Annotated[str, Field(max_length=253)] = ""
    """Key of the label, taint, condition or resource; `*` and `?` are wild cards."""
    values: tuple[str, ...] = ()
    """Values that are bad, with wild cards: of a label or taint (none: any value), or the status of a condition."""
    reasons: tuple[str, ...] = ()
    """Reasons of a condition, with wild cards, to which the rule is limited; none: any reason."""
    severity: Severity
    debounce_seconds: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """For how long the signal must have been seen before anything is done."""
    recovery_seconds: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """For how long it must have been gone to be forgotten: a flapping signal is one signal."""
    meaning: Annotated[str, Field(max_length=300)] = ""
    """In words for people: shown in events and in the documentation."""
    source: Annotated[str, Field(max_length=300)] = ""
    """Where the signal is described; for the documentation."""

    @model_validator(mode="after")
    def _complete(self) -> NodeRule:
        if self.kind == "Unschedulable":
            if self.key or self.values:
                raise ValueError("a rule of kind Unschedulable has neither key nor values")
        elif not self.key:
            raise ValueError(f"a rule of kind {self.kind} needs a key")
        if self.kind == "Condition" and not self.values:
            raise ValueError("a rule of kind Condition needs values: the polarity of conditions differs")
        if self.kind in ("Allocatable", "Missing") and self.values:
            raise ValueError(f"a rule of kind {self.kind} has no values")
        if self.reasons and self.kind != "Condition":
            raise ValueError("only conditions have reasons")
        return self


DRAIN = NodeRule(
    name="drain-waits-for-budget",
    kind="Unschedulable",
    severity=Severity.CHECKPOINT_THEN_MOVE,
    debounce_seconds=60.0,
    meaning="the node is cordoned, and the PodDisruptionBudget of the session would hold back its drain for ever",
)
"""Holds in every installation, for sessions with `spec.pod.disruptionBudget`."""

_RULES = TypeAdapter(list[NodeRule])


def parse(text: str | bytes) -> tuple[NodeRule, ...]:
    """The rules of an installation, from JSON. The last of those with one name counts. Raises ValidationError."""
    return tuple({rule.name: rule for rule in _RULES.validate_json(text)}.values())


@dataclass(frozen=True, slots=True)
class Signal:
    """A rule that a node has met; without its times two sightings of the same thing are equal."""

    rule: str
    severity: Severity
    detail: str
    """What was seen, with its key."""
    since: datetime
    """When it was first seen, by the operator's own clock."""
    due: datetime
    """From when on it counts."""
    gone: datetime | None = None
    """When it was no longer seen; None while it is."""


def signals(
    body: Body, rules: Sequence[NodeRule], *, now: datetime, previous: Sequence[Signal] = ()
) -> tuple[Signal, ...]:
    """What a node shows now. `previous` is what the same node showed before: it keeps the times."""
    before = {signal.rule: signal for signal in previous}
    found = []
    for rule in rules:
        old = before.get(rule.name)
        detail = next(_matches(body, rule), None)
        if detail is not None:
            # A clock that was set back must not leave a signal that never comes due.
            since = old.since if old and old.since <= now else now
            due = since + timedelta(seconds=rule.debounce_seconds)
            found.append(Signal(rule.name, rule.severity, detail, since, due))
        elif old is not None:
            gone = old.gone or now
            if timedelta(0) <= now - gone < timedelta(seconds=rule.recovery_seconds):
                found.append(replace(old, gone=gone))
    return tuple(found)


def counts(signal: Signal, now: datetime) -> bool:
    """Whether it is there, and has been for long enough."""
    return signal.gone is None and signal.due <= now


def active(present: Sequence[Signal], now: datetime) -> Signal | None:
    """The worst signal that counts now, or None."""
    counting = [signal for signal in present if counts(signal, now)]
    return max(counting, key=lambda signal: (signal.severity.rank, signal.rule), default=None)


def due_at(present: Sequence[Signal], now: datetime) -> datetime | None:
    """When the next signal will count, if it stays."""
    return min((signal.due for signal in present if signal.gone is None and signal.due > now), default=None)


def _matches(body: Body, rule: NodeRule) -> Iterator[str]:
    """Yields what the rule matches, in words."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    match rule.kind:
        case "Label":
            for key, value in (metadata.get("labels") or {}).items():
                if fnmatchcase(key, rule.key) and _any(value, rule.values):
                    yield f"label {key}={value}"
        case "Taint":
            for taint in spec.get("taints") or ():
                value = taint.get("value") or ""
                if fnmatchcase(taint["key"], rule.key) and _any(value, rule.values):
                    yield f"taint {taint['key']}={value}:{taint['effect']}"
        case "Condition":
            for condition in status.get("conditions") or ():
                reason = condition.get("reason") or ""
                if (
                    fnmatchcase(condition["type"], rule.key)
                    and _any(condition["status"], rule.values)
                    and _any(reason, rule.reasons)
                ):
                    yield f"condition {condition['type']}={condition['status']} ({reason or 'no reason given'})"
        case "Unschedulable":
            if spec.get("unschedulable"):
                yield "it is cordoned"
        case "Allocatable":
            yield from _short_of_devices(status, rule.key)
        case "Missing":
            if not any(fnmatchcase(key, rule.key) for key in metadata.get("labels") or {}):
                yield f"label {rule.key} is missing"


def _short_of_devices(status: Body, pattern: str) -> Iterator[str]:
    allocatable = status.get("allocatable") or {}
    for name, amount in (status.get("capacity") or {}).items():
        # A device plugin that has not registered yet shows neither. Both are whole numbers in canonical form, and
        # allocatable is never greater.
        if fnmatchcase(name, pattern) and allocatable.get(name, amount) != amount:
            yield f"only {allocatable[name]} of {amount} {name} are allocatable"


def _any(value: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(value, pattern) for pattern in patterns)
