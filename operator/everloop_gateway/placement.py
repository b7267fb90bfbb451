"""Which TrainingSession a new model or sampling session belongs to, and when one is made for it. Pure functions."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from everloop_gateway.catalogue import CatalogueEntry, SessionTemplate, canonical_name, session_name
from everloop_gateway.ids import shorten
from everloop_gateway.routing import SessionView, Wait
from everloop_operator.api import names

LONGEST_NAME = 200
"""Characters of an unknown name that are compared with known ones, and shown."""


class Unplaceable(ValueError):
    """No TrainingSession of the namespace serves this base model, and none is made; the message says why."""


@dataclass(frozen=True, slots=True)
class Create:
    """Make this one, then decide again."""

    name: str
    base_model: str
    template: SessionTemplate


def place(
    base_model: str,
    namespace: str,
    sessions: Sequence[SessionView],
    catalogue: Sequence[CatalogueEntry],
    *,
    needs_slot: bool,
    only: str = "",
) -> SessionView | Create | Wait:
    """Decide where a new model (needs_slot) or a new sampling session goes.

    Of several sessions that serve the base model: the one labelled as default, else one that is serving, else one
    that may yet serve; the oldest of these; none that is full, failed or stopped while the catalogue allows another.
    It is waited for until its claim is known, which is to own the binding, and for a little while if it
    names a claim that is not there. Where `only` names a session, no other is looked at, and none is made.
    Raises Unplaceable.
    """
    present = [s for s in sessions if s.namespace == namespace and only in ("", s.name)]
    living = [session for session in present if not session.deleting]
    served = {session.base_model for session in living}
    wanted = base_model if base_model in served else canonical_name(base_model, catalogue)
    matching = sorted((session for session in living if session.base_model == wanted), key=_preference)
    with_room = [session for session in matching if not (needs_slot and session.full)]
    # A default that failed is not passed over: somebody has said that it is to be this one.
    best = next((s for s in with_room if s.default or not s.over), None)
    creatable = [] if only else [e for e in catalogue if e.creatable_in(namespace)]
    template = next((entry.template for entry in creatable if entry.name == wanted), None)
    if best is None and template is not None:
        return _another(base_model, wanted, template, present)
    if best is None and matching:
        # It says itself what it has no room for.
        best = matching[0]
    if best is None:
        raise Unplaceable(_no_session(base_model, namespace, served, catalogue))
    if best.over:
        raise Unplaceable(f"base_model {shorten(base_model)!r}: {best.state}")
    if best.missing_claim and best.incarnation is None:
        return Wait(f"{best.title}: {best.missing_claim}", mistaken=True)
    if not best.claim.uid:
        return Wait(best.state)
    return best


def _another(base_model: str, wanted: str, template: SessionTemplate, present: Sequence[SessionView]) -> Create | Wait:
    """The first derived name that is free. Raises Unplaceable if there is none up to the limit."""
    by_name = {session.name: session for session in present}
    taken = []
    for number in range(1, template.limit + 1):
        name = session_name(wanted, number)
        holder = by_name.get(name)
        if holder is None:
            return Create(name, wanted, template)
        if holder.deleting:
            return Wait(f"{holder.title} is being deleted")
        taken.append(_hindrance(holder, wanted))
    raise Unplaceable(
        f"base_model {shorten(base_model)!r}: the limit of {template.limit} in the catalogue is reached: "
        + "; ".join(taken)
    )


def _hindrance(holder: SessionView, wanted: str) -> str:
    if holder.base_model != wanted:
        return f"{holder.title} has the name that would be given, and serves {holder.base_model}"
    if holder.over:
        return holder.state
    return f"{holder.title} has {holder.model_count} of {holder.max_models} models (spec.adapters.maxModels)"


def _preference(session: SessionView) -> tuple[bool, bool, bool, bool, str, str]:
    running, suspended = session.phase == names.PHASE_RUNNING, session.phase == names.PHASE_SUSPENDED
    return not session.default, not running, session.over, suspended, session.created, session.name


def _no_session(base_model: str, namespace: str, served: set[str], catalogue: Sequence[CatalogueEntry]) -> str:
    known = served | {entry.name for entry in catalogue if entry.creatable_in(namespace)}
    aliases = {alias: entry.name for entry in catalogue for alias in entry.aliases if entry.name in known}
    near = {name.lower(): name for name in (*sorted(known), *aliases)}
    close = difflib.get_close_matches(base_model[:LONGEST_NAME].lower(), near, n=1)
    hint = f" (did you mean {near[close[0]]!r}?)" if close else ""
    return (
        f"base_model {base_model[:LONGEST_NAME]!r}: no TrainingSession in namespace {namespace!r} serves it; "
        f"known: {', '.join(sorted(known)) or 'none'}{hint}"
    )
