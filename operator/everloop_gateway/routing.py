"""TrainingSessions as the gateway sees them, and to which incarnation a bound request goes. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from everloop_gateway.keys import Principal
from everloop_operator.api import names

# A TrainingSession that is not seen may be about to be: another replica's watch was ahead of ours,
# or somebody is just creating it again under the same name.
GONE_AFTER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One pod of one attempt, as the status names it."""

    attempt: int
    pod_uid: str
    ip: str


@dataclass(frozen=True, slots=True)
class Claim:
    """The PersistentVolumeClaim of a journal; without a UID where the operator has not found it."""

    name: str
    uid: str


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
    model_count: int
    max_models: int
    claim: Claim
    lineage: str
    """Identifier of what its storage holds; empty until a pod has opened it."""
    missing_claim: str
    """Which claim it names that is not there, in the operator's words; empty if there is none."""
    stopped: bool = False
    """Whether it is, or is about to be, stopped for ever."""
    idle: bool = False
    """Whether it has given its pod back because nobody used it."""
    refuses: bool = False
    """Whether calls must not end that."""

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"TrainingSession {self.namespace}/{self.name}"

    @property
    def full(self) -> bool:
        """Has it as many models as it may have?"""
        return self.model_count >= self.max_models

    @property
    def over(self) -> bool:
        """Will it take no new model, as it is?"""
        return self.stopped or self.phase == names.PHASE_FAILED or (self.idle and self.refuses)

    @property
    def state(self) -> str:
        """One sentence on what is happening, for the user who waits."""
        return f"{self.title} is {self.phase or 'new'}" + (f": {self.explanation}" if self.explanation else "")

    def bind(self, identifier: str, principal: Principal, weights: str | None) -> Binding:
        """The binding of a stream, for this key, to this session as it is today."""
        return Binding(
            id=identifier,
            namespace=self.namespace,
            session=self.name,
            uid=self.uid,
            base_model=self.base_model,
            weights=weights,
            key_id=principal.key_id,
            claim=self.claim,
            lineage=self.lineage or None,
            job=principal.job,
        )


@dataclass(frozen=True, slots=True)
class Binding:
    """Which TrainingSession a model or a sampling session belongs to; written once, before the first answer.

    weights is a tinker path, ``base``, or None where the session pod itself knows the sampling session. lineage is
    None until the first call is sent to a pod, if there was none yet when the binding was written.
    """

    id: str
    namespace: str
    session: str
    uid: str
    base_model: str
    weights: str | None
    key_id: str
    claim: Claim
    lineage: str | None
    job: str = ""
    """UID of the RLJob whose key it was made with."""

    def derive(self, identifier: str, principal: Principal, weights: str | None) -> Binding:
        """The binding of another stream, for this key, to the same storage."""
        return replace(self, id=identifier, weights=weights, key_id=principal.key_id, job=principal.job)


@dataclass(frozen=True, slots=True)
class Target:
    """Send it there."""

    uid: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Settle:
    """Record first that the binding's TrainingSession has this lineage."""

    lineage: str
    claim: Claim


@dataclass(frozen=True, slots=True)
class Wait:
    """Nowhere to send it yet; `mistaken` if somebody has to put something right first."""

    reason: str
    mistaken: bool = False
    wakes: str = ""
    """UID of the TrainingSession that is to be told that it is needed; empty if none is."""


@dataclass(frozen=True, slots=True)
class Gone:
    """There will never be anywhere to send it."""

    detail: str


@dataclass(frozen=True, slots=True)
class Stopped(Gone):
    """The same, because its TrainingSession was stopped: what is in its storage is still there."""


def housed(binding: Binding, session: SessionView | None) -> Binding:
    """A binding that is about to be written, made of an older one: owned by the claim that its storage is on today."""
    if session is None or not session.claim.uid or session.lineage != binding.lineage:
        return binding
    return replace(binding, claim=session.claim)


def session_view(resource: dict[str, Any]) -> SessionView:
    """Read a TrainingSession object of the API, whose shape the CRD's schema has checked."""
    metadata, spec, status = resource["metadata"], resource["spec"], resource.get("status") or {}
    pod, attempt, storage = status.get("pod") or {}, status.get("attempt"), status.get("storage") or {}
    rest = (status.get("rest") or {}).get("state")
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
        model_count=status.get("modelCount") or 0,
        max_models=spec["adapters"]["maxModels"],
        claim=Claim(_journal_claim(metadata["name"], spec["storage"]["journal"]), storage.get("claimUID") or ""),
        lineage=storage.get("lineage") or "",
        missing_claim=missing_claim(status.get("conditions") or []),
        stopped=rest == names.PHASE_STOPPED,
        idle=rest == names.PHASE_IDLE,
        refuses=(spec.get("idle") or {}).get("onCall") == "Refuse",
    )


def _journal_claim(session: str, journal: dict[str, Any]) -> str:
    return str(journal["claim"]["claimName"]) if "claim" in journal else session + names.JOURNAL_CLAIM_SUFFIX


def missing_claim(conditions: Iterable[dict[str, Any]]) -> str:
    """Which PersistentVolumeClaim that the spec names does not exist: the message of the condition that says so."""
    said = (c.get("message", "") for c in conditions if c.get("reason") == names.REASON_CLAIM_NOT_FOUND)
    return next(said, "")


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


def find_target(binding: Binding, session: SessionView | None, missing_seconds: float) -> Target | Settle | Wait | Gone:
    """Where a bound request goes now.

    A TrainingSession that was created again under the same name on the same storage adopts its lineage, so its
    predecessor's models live on in it; with another base model or another lineage they are gone. Nothing is sent
    anywhere before the lineage there is known: what it accepted could not be found again.
    """
    title = f"TrainingSession {binding.namespace}/{binding.session}"
    if session is None:
        if missing_seconds >= GONE_AFTER_SECONDS:
            return Gone(f"{binding.id}: {title} was deleted")
        return Wait(f"{title} is not there")
    if session.uid != binding.uid and session.base_model != binding.base_model:
        return Gone(f"{binding.id}: {title} now serves {session.base_model}, and no longer {binding.base_model}")
    if session.lineage and binding.lineage not in (None, session.lineage):
        return Gone(
            f"{binding.id}: {title} was created again on other storage (lineage {session.lineage}) "
            f"than this model's (lineage {binding.lineage})"
        )
    if session.stopped:
        return Stopped(f"{binding.id}: {session.state}")
    if session.incarnation is None:
        return Wait(session.state, wakes=session.uid if session.idle and not session.refuses else "")
    if not session.lineage:
        return Wait(f"{session.state}; the lineage of its storage is not known yet")
    if binding.lineage is None:
        return Settle(session.lineage, session.claim)
    return Target(session.uid, session.incarnation)
