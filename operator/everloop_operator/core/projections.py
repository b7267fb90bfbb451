"""Objects of the API server -> the values of `observed`. What is not needed for a decision is dropped here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.api.training_session_status import TrainingSessionStatus

from . import gpus
from .node_rules import NodeRule, signals
from .observed import Claim, Container, Node, Notice, Pod, Session, Volume

Body = Mapping[str, Any]

VOLUME_SOURCES = frozenset(
    {"csi", "nfs", "hostPath", "local", "cephfs", "rbd", "iscsi", "fc", "flexVolume", "glusterfs"}
)
"""Keys of a PersistentVolume's spec of which each says what it comes from."""

INITIALIZING = "PodInitializing"
"""What a kubelet says of containers while those that start before them have not done so."""


def parse_time(text: str | None) -> datetime | None:
    """An RFC 3339 time of the API server, or None."""
    return datetime.fromisoformat(text) if text else None


def format_time(value: datetime) -> str:
    """RFC 3339 with milliseconds, in UTC."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def session_of(body: Body) -> Session:
    """Never fails: an object that this version can't read becomes a Session with a `problem`."""
    metadata = body["metadata"]
    spec, problem = None, ""
    try:
        spec = TrainingSessionSpec.model_validate(body.get("spec") or {})
    except ValidationError as error:
        problem = spec_problem(error)
    try:
        status = TrainingSessionStatus.model_validate(body.get("status") or {})
    except ValidationError:
        # Only a version with other limits can have written it. What matters of it is the attempt.
        raw = (body.get("status") or {}).get("attempt")
        status = TrainingSessionStatus(attempt=raw if isinstance(raw, int) else 0)
    return Session(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        status=status,
        problem=problem,
        paused=metadata.get("annotations", {}).get(names.ANNOTATION_PAUSED) == "true",
        finalizers=tuple(metadata.get("finalizers", ())),
        deletion_time=parse_time(metadata.get("deletionTimestamp")),
        made_by_gateway=metadata.get("labels", {}).get(names.LABEL_CREATED_BY) == names.CREATED_BY_GATEWAY,
        wake=metadata.get("annotations", {}).get(names.ANNOTATION_WAKE, "")[:128],
    )


def spec_problem(error: ValidationError) -> str:
    """Why a spec can't be read, by its fields, for people."""
    return "; ".join(f"spec.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])


def owner_uid(body: Body, kind: str = names.TRAINING_SESSION_KIND) -> str:
    """UID of the controlling object of this kind, or ''."""
    for owner in body["metadata"].get("ownerReferences", ()):
        if owner.get("controller") and owner["kind"] == kind:
            return str(owner["uid"])
    return ""


def pod_of(body: Body, container: str = names.TRAINER_CONTAINER) -> Pod | None:
    """A pod of ours with the state of this container, or None if its labels are not ours."""
    metadata, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    attempt = metadata.get("labels", {}).get(names.LABEL_ATTEMPT, "")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", attempt):
        return None
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") in (
        "Unschedulable",
        "SchedulerError",
    )
    disruption = conditions.get("DisruptionTarget", {})
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        attempt=int(attempt),
        created=_required_time(metadata["creationTimestamp"]),
        phase=status.get("phase", "Pending"),
        node=spec.get("nodeName", ""),
        ip=status.get("podIP", ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        scheduled=parse_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        unschedulable_since=parse_time(scheduled.get("lastTransitionTime")) if unschedulable else None,
        unschedulable_message=scheduled.get("message", "") if unschedulable else "",
        gates=tuple(gate["name"] for gate in spec.get("schedulingGates", ())),
        deletion_requested=_deletion_requested(metadata),
        disruption=disruption.get("reason", "") if disruption.get("status") == "True" else "",
        failure=": ".join(filter(None, (status.get("reason"), status.get("message")))),
        gpus=gpus.held(spec),
        template_hash=metadata.get("annotations", {}).get(names.ANNOTATION_TEMPLATE_HASH, ""),
        avoided_nodes=frozenset(
            filter(None, metadata.get("annotations", {}).get(names.ANNOTATION_AVOIDED_NODES, "").split(","))
        ),
        container=container_of(status, container),
        fetch=container_of(status, names.FETCH_CONTAINER),
    )


def node_of(body: Body, *, now: datetime, rules: Sequence[NodeRule] = (), previous: Node | None = None) -> Node:
    """A node; `previous` keeps the times since which it has not been Ready and has shown its signals.

    The transition time of another machine's clock counts only for a node that was not Ready before this operator first
    saw it: an operator that itself came from a lost node must not wait once more for what it finds.
    """
    metadata = body["metadata"]
    ready: Body = next((c for c in (body.get("status") or {}).get("conditions", ()) if c["type"] == "Ready"), {})
    is_ready = ready.get("status") == "True"
    if previous is not None and previous.uid != metadata["uid"]:
        previous = None
    since = None
    if not is_ready and previous:
        since = previous.not_ready_since or now
    elif not is_ready:
        since = min(now, parse_time(ready.get("lastTransitionTime")) or now)
    return Node(
        name=metadata["name"],
        uid=metadata["uid"],
        hostname=metadata.get("labels", {}).get(names.NODE_HOSTNAME_LABEL, metadata["name"]),
        ready=is_ready,
        reason=str(ready.get("reason", "")),
        not_ready_since=since,
        out_of_service=any(t["key"] == names.TAINT_OUT_OF_SERVICE for t in body.get("spec", {}).get("taints", ())),
        signals=signals(body, rules, now=now, previous=previous.signals if previous else ()),
    )


def claim_of(body: Body) -> Claim:
    """A PersistentVolumeClaim. What the bound volume offers is in its status."""
    status = body.get("status") or {}
    modes = status.get("accessModes") or body["spec"].get("accessModes", ())
    metadata = body["metadata"]
    return Claim(
        name=metadata["name"],
        uid=metadata["uid"],
        phase=status.get("phase", "Pending"),
        access_modes=frozenset(modes),
        volume_name=body["spec"].get("volumeName", ""),
        deleting="deletionTimestamp" in metadata,
    )


def volume_of(body: Body) -> Volume:
    """A PersistentVolume.

    A `hostPath` that is bound to no node counts as shared if its claim says so: file systems that every node mounts
    itself are given to pods in this way.
    """
    spec = body["spec"]
    kind = next((key for key in spec if key in VOLUME_SOURCES), "")
    source = spec.get(kind) or {}
    terms = (spec.get("nodeAffinity") or {}).get("required", {}).get("nodeSelectorTerms", ())
    expressions = [expression for term in terms for expression in term.get("matchExpressions", ())]
    pinned = any(expression["key"] == names.NODE_HOSTNAME_LABEL for expression in expressions)
    exclusive = "ReadWriteMany" not in spec.get("accessModes", ())
    return Volume(
        source=source.get("driver", "") if kind == "csi" else kind,
        node_local=kind == "local" or pinned or (kind == "hostPath" and exclusive),
        read_only=source.get("readOnly") is True or "read-only" in spec.get("mountOptions", ()),
    )


def newest_notice(items: Sequence[Body]) -> Notice | None:
    """The newest of the events of one object."""
    notices = [
        Notice(str(item.get("reason", "")), str(item.get("message", ""))[:512], moment)
        for item in items
        if (moment := parse_time(item.get("lastTimestamp") or item.get("eventTime")))
    ]
    return max(notices, key=lambda notice: notice.time, default=None)


def _required_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _deletion_requested(metadata: Body) -> datetime | None:
    """DeletionTimestamp is when the grace period ends; what counts here is when deletion was asked for."""
    ends = parse_time(metadata.get("deletionTimestamp"))
    return ends - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0) if ends else None


def container_of(status: Body, name: str) -> Container:
    """The state of one container in the status of a pod, ordinary or sidecar.

    One that waits for those before it says what they wait for.
    """
    listed = (*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ()))
    found = [item for item in listed if item["name"] == name]
    if not found:
        return Container()
    state, last = found[0].get("state", {}), found[0].get("lastState", {})
    waiting = state.get("waiting", {})
    if waiting.get("reason") == INITIALIZING:
        waiting = _held_up(status) or waiting
    ended = state.get("terminated") or last.get("terminated") or {}
    return Container(
        running="running" in state,
        started=parse_time(state.get("running", {}).get("startedAt")),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        restarts=found[0].get("restartCount", 0),
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason", ""),
        exit_message=ended.get("message", "").strip(),
        finished=parse_time(ended.get("finishedAt")),
    )


def _held_up(status: Body) -> Body | None:
    """Why the first of the containers that start before the others does not start; None if it just takes its time."""
    for item in status.get("initContainerStatuses", ()):
        waiting = item.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "", INITIALIZING, "ContainerCreating"):
            return {**waiting, "message": f"container {item['name']}: {waiting.get('message', '')}"}
    return None
