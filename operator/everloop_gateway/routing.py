"""Which TrainingSession serves a request, and which incarnation of its pod. Pure functions over plain values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everloop_operator.api import names

# A TrainingSession that is not seen may be about to be: another replica's watch was ahead of ours,
# or somebody is just creating it again under the same name.
GONE_AFTER_SECONDS = 30.0


class InvalidCatalogue(ValueError):
    """The catalogue ConfigMap is not what it should be; the message names the field."""


class UnknownBaseModel(ValueError):
    """No TrainingSession of the namespace serves this base model; the message lists those that are served."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One pod of one attempt, as the status names it."""

    attempt: int
    pod_uid: str
    ip: str


@dataclass(frozen=True, slots=True)
class SessionView:
    """What the gateway needs to know of a TrainingSession."""

    namespace: str
    name: str
    uid: str
    base_model: str
    max_sequence_length: int | None
    created: str
    default: bool
    deleting: bool
    phase: str
    explanation: str
    incarnation: Incarnation | None

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"TrainingSession {self.namespace}/{self.name}"

    @property
    def state(self) -> str:
        """One sentence on what is happening, for the user who waits."""
        return f"{self.title} is {self.phase or 'new'}" + (f": {self.explanation}" if self.explanation else "")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A base model by its names."""

    name: str
    aliases: tuple[str, ...]
    tokenizer_id: str | None


@dataclass(frozen=True, slots=True)
class Binding:
    """Which TrainingSession a model or a sampling session belongs to; written once, before the first answer.

    weights is a tinker path, ``base``, or None where the session pod itself knows the sampling session.
    """

    id: str
    namespace: str
    session: str
    uid: str
    base_model: str
    weights: str | None
    key_id: str


@dataclass(frozen=True, slots=True)
class Target:
    """Send it there."""

    uid: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Wait:
    """Nowhere to send it yet."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """There will never be anywhere to send it."""

    detail: str


def session_view(resource: dict[str, Any]) -> SessionView:
    """Read a TrainingSession object of the API, whose shape the CRD's schema has checked."""
    metadata, spec, status = resource["metadata"], resource["spec"], resource.get("status") or {}
    pod, attempt = status.get("pod") or {}, status.get("attempt")
    incarnation = None
    if attempt is not None and pod.get("uid") and pod.get("ip"):
        incarnation = Incarnation(attempt, pod["uid"], pod["ip"])
    return SessionView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        base_model=spec["baseModel"]["name"],
        max_sequence_length=(spec.get("engine") or {}).get("maxSequenceLength"),
        created=metadata["creationTimestamp"],
        default=(metadata.get("labels") or {}).get(names.LABEL_DEFAULT) == "true",
        deleting="deletionTimestamp" in metadata,
        phase=status.get("phase") or "",
        explanation=explain(status.get("conditions") or []),
        incarnation=incarnation,
    )


def explain(conditions: Iterable[dict[str, Any]]) -> str:
    """Why a TrainingSession is not serving: the message, else the reason, of the condition that says most about it."""
    by_type = {condition["type"]: condition for condition in conditions}
    telling = [
        by_type[kind]
        for kind, bad in (
            (names.CONDITION_STALLED, "True"),
            (names.CONDITION_SERVING, "False"),
            (names.CONDITION_RECONCILING, "True"),
        )
        if kind in by_type and by_type[kind]["status"] == bad
    ]
    return next((c.get("message") or c.get("reason") or "" for c in telling), "")


def catalogue_entries(value: object) -> tuple[CatalogueEntry, ...]:
    """Read the parsed catalogue.json. Raises InvalidCatalogue."""
    if not isinstance(value, list):
        raise InvalidCatalogue(f"{names.CATALOGUE_FIELD}: not a list")
    return tuple(_entry(item, f"{names.CATALOGUE_FIELD}[{index}]") for index, item in enumerate(value))


def canonical_name(base_model: str, catalogue: Iterable[CatalogueEntry]) -> str:
    """The name behind an alias; any other text is its own name."""
    return next((entry.name for entry in catalogue if base_model in entry.aliases), base_model)


def choose_session(
    base_model: str, namespace: str, sessions: Sequence[SessionView], catalogue: Sequence[CatalogueEntry]
) -> SessionView:
    """The TrainingSession of the namespace that a new model or sampling session is bound to.

    Several serve the base model: the one labelled as default, else one that is serving, else one that may
    yet serve; the oldest of these. Raises UnknownBaseModel.
    """
    present = [session for session in sessions if session.namespace == namespace and not session.deleting]
    served = {session.base_model for session in present}
    wanted = base_model if base_model in served else canonical_name(base_model, catalogue)
    matching = [session for session in present if session.base_model == wanted]
    if not matching:
        raise UnknownBaseModel(_no_session(base_model, namespace, served, catalogue))
    return min(
        matching,
        key=lambda s: (not s.default, s.phase != names.PHASE_RUNNING, s.phase == names.PHASE_FAILED, s.created, s.name),
    )


def find_target(binding: Binding, session: SessionView | None, missing_seconds: float) -> Target | Wait | Gone:
    """Where a bound request goes now.

    A TrainingSession that was created again under the same name for the same base model adopts the stored
    lineage, so its predecessor's models live on in it; with another base model they are gone.
    """
    title = f"TrainingSession {binding.namespace}/{binding.session}"
    if session is None:
        if missing_seconds >= GONE_AFTER_SECONDS:
            return Gone(f"{binding.id}: {title} was deleted")
        return Wait(f"{title} is not there")
    if session.uid != binding.uid and session.base_model != binding.base_model:
        return Gone(f"{binding.id}: {title} now serves {session.base_model}, and no longer {binding.base_model}")
    if session.incarnation is None:
        return Wait(session.state)
    return Target(session.uid, session.incarnation)


def _no_session(base_model: str, namespace: str, served: Iterable[str], catalogue: Iterable[CatalogueEntry]) -> str:
    known = sorted(served)
    aliases = {alias: entry.name for entry in catalogue for alias in entry.aliases if entry.name in set(known)}
    near = {name.lower(): name for name in (*known, *aliases)}
    close = difflib.get_close_matches(base_model.lower(), near, n=1)
    hint = f" (did you mean {near[close[0]]!r}?)" if close else ""
    return (
        f"base_model {base_model[:200]!r}: no TrainingSession in namespace {namespace!r} serves it; "
        f"known: {', '.join(known) or 'none'}{hint}"
    )


def _entry(item: object, where: str) -> CatalogueEntry:
    if not isinstance(item, dict):
        raise InvalidCatalogue(f"{where}: not an object")
    name, aliases, tokenizer = item.get("name"), item.get("aliases") or [], item.get("tokenizer_id") or None
    if not isinstance(name, str) or not name:
        raise InvalidCatalogue(f"{where}.name: a non-empty string is required")
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InvalidCatalogue(f"{where}.aliases: a list of strings is required")
    if tokenizer is not None and not isinstance(tokenizer, str):
        raise InvalidCatalogue(f"{where}.tokenizer_id: a string is required")
    return CatalogueEntry(name, tuple(aliases), tokenizer)
