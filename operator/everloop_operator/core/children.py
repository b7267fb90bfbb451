"""Builds the objects of an attempt: the session pod and its token secret."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec

from . import copies, evictions, fetching, overlay, volumes
from .elsewhere import other_than
from .observed import Session

LIVE = ("checkpoints", "deadlines", "deletion", "idle", "recovery", "stop", "suspend", "ttl_seconds_after_finished")
"""Fields of the spec that take effect at once, without a new attempt."""

Body = dict[str, Any]


def pod_name(session: str, attempt: int) -> str:
    """Name of the pod of an attempt."""
    return f"{session}-a{attempt}-0"


def secret_name(session: str, attempt: int) -> str:
    """Name of the token secret of an attempt."""
    return f"{session}-a{attempt}-token"


def template_hash(spec: TrainingSessionSpec) -> str:
    """Hash over everything of the spec that a running pod can't take over.

    The installation's own image is not part of it: a new release takes effect with the next attempt, not by a restart
    of every session. Defaults are left out, so that a field which a later version adds changes no hash.
    """
    return _hash(spec, LIVE)


def fitting_hashes(spec: TrainingSessionSpec) -> tuple[str, str]:
    """Hashes of pods that need not be replaced: of a new one, and of one whose trainer can't take over checkpoints."""
    return template_hash(spec), _hash(spec, tuple(field for field in LIVE if field != "checkpoints"))


def _hash(spec: TrainingSessionSpec, live: Sequence[str]) -> str:
    fields: dict[str, Any] = dict.fromkeys(live, True)
    excluded = fields | {"storage": {"allow_node_local"}}
    inputs = spec.model_dump(mode="json", by_alias=True, exclude=excluded, exclude_defaults=True)
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def trainer_config(session: Session, spec: TrainingSessionSpec, attempt: int) -> Body:
    """What the trainer reads from `EVERLOOP_CONFIG`."""
    return {
        "format": 1,
        "namespace": session.namespace,
        "name": session.name,
        "uid": session.uid,
        "attempt": attempt,
        "baseModel": {
            "name": spec.base_model.name,
            "revision": spec.base_model.revision,
            "path": fetching.model_path(spec),
        },
        "engine": {
            "dtype": spec.engine.dtype,
            "maxSequenceLength": spec.engine.max_sequence_length,
            "threads": spec.engine.threads,
            # Without it the trainer has the same defaults; older ones know no images.
            **({"images": images} if (images := _images(spec)) else {}),
            "deterministic": True,
        },
        "adapters": {"maxModels": spec.adapters.max_models, "maxRank": spec.adapters.max_rank},
        "storage": {"root": f"{volumes.JOURNAL_MOUNT}/{session.namespace}/{session.name}"},
        "snapshots": {"replayBudgetSeconds": spec.snapshots.replay_budget_seconds},
        "checkpoints": {"everySeconds": spec.checkpoints.every_seconds, "keepLast": spec.checkpoints.keep_last},
        **({"copies": configured} if (configured := copies.trainer_config(spec)) else {}),
        "tokenFile": f"{volumes.TOKEN_MOUNT}/{names.TOKEN_FIELD}",
    }


def _images(spec: TrainingSessionSpec) -> Body:
    return spec.engine.images.model_dump(by_alias=True, exclude_defaults=True)


def pod(
    session: Session,
    spec: TrainingSessionSpec,
    attempt: int,
    *,
    image: str,
    avoid: Sequence[str],
    shun: Sequence[str],
    evicted_after: int | None = None,
) -> Body:
    """The pod of an attempt. `image` is the installation's.

    Kubernetes evicts it from a lost node after `evicted_after` seconds; None means never, because the operator sees
    the loss itself.
    It must not run on the hostnames of `avoid`, and prefers others to those of `shun`. Names that an overlay could
    have as well, of volumes, variables, mounts and containers, are among those that `api.pod_overlay` reserves.
    """
    pod_spec: Body = {
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": evictions.tolerations(evicted_after),
        "containers": [_container(session, spec, attempt, spec.image or image)],
        "volumes": volumes.volumes(session.name, spec, secret_name(session.name, attempt)),
    }
    fetch = fetching.init_containers(spec, spec.image or image, overlay.CONFINED)
    if fetch:
        pod_spec["initContainers"] = fetch
    affinity: Body = {}
    if avoid:
        required = {"nodeSelectorTerms": [other_than(avoid)]}
        affinity[overlay.REQUIRED] = required
    if shun:
        preferred = [{"weight": 100, "preference": other_than(shun)}]
        affinity[overlay.PREFERRED] = preferred
    if affinity:
        pod_spec["affinity"] = {"nodeAffinity": affinity}
    metadata = _metadata(session, pod_name(session.name, attempt), attempt)
    metadata["annotations"] = {
        names.ANNOTATION_TEMPLATE_HASH: template_hash(spec),
        # A move for the sake of tidiness costs a recovery.
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    if avoid:
        metadata["annotations"][names.ANNOTATION_AVOIDED_NODES] = ",".join(avoid)
    return overlay.lay({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}, spec.pod)


def token_secret(session: Session, attempt: int, token: str) -> Body:
    """The secret that holds the token by which the gateway and the operator speak to the pod."""
    metadata = _metadata(session, secret_name(session.name, attempt), attempt)
    metadata["labels"][names.LABEL_TYPE] = names.TYPE_SESSION_TOKEN
    data = {names.TOKEN_FIELD: base64.b64encode(token.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}


def disruption_budget(session: Session, attempt: int, uid: str) -> Body:
    """Holds back evictions of the pod of an attempt, which has this UID and which it goes with."""
    name = pod_name(session.name, attempt)
    metadata = _metadata(session, name, attempt)
    metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]
    selector = {names.LABEL_SESSION: session.name, names.LABEL_ATTEMPT: str(attempt)}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        # A pod that can't serve is not worth a drain that waits.
        "spec": {
            "minAvailable": 1,
            "selector": {"matchLabels": selector},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _metadata(session: Session, name: str, attempt: int) -> Body:
    return {
        "name": name,
        "namespace": session.namespace,
        "labels": {
            "app.kubernetes.io/name": "everloop",
            "app.kubernetes.io/instance": session.name,
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            names.LABEL_COMPONENT: names.COMPONENT_TRAINER,
            names.LABEL_SESSION: session.name,
            names.LABEL_ATTEMPT: str(attempt),
        },
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.TRAINING_SESSION_KIND,
                "name": session.name,
                "uid": session.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _container(session: Session, spec: TrainingSessionSpec, attempt: int, image: str) -> Body:
    config = json.dumps(trainer_config(session, spec, attempt), sort_keys=True, separators=(",", ":"))
    return {
        "name": names.TRAINER_CONTAINER,
        "image": image,
        "env": [
            {"name": "EVERLOOP_CONFIG", "value": config},
            {"name": "EVERLOOP_GRACE_SECONDS", "value": str(spec.pod.termination_grace_period_seconds)},
            {"name": "EVERLOOP_RUN_DIR", "value": volumes.RUN_DIRECTORY},
            {"name": "TMPDIR", "value": "/tmp"},  # noqa: S108 - a mount of its own
            *(
                {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
                for name, path in (
                    ("NODE_NAME", "spec.nodeName"),
                    ("POD_IP", "status.podIP"),
                    ("POD_NAME", "metadata.name"),
                    ("POD_UID", "metadata.uid"),
                )
            ),
        ],
        "ports": [{"name": "http", "containerPort": names.TRAINER_PORT, "protocol": "TCP"}],
        "resources": spec.workers.resources.model_dump(mode="json", by_alias=True),
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "http", "scheme": "HTTP"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        # Restarts a server that hangs; patient, because a restart costs a recovery.
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "http", "scheme": "HTTP"},
            "initialDelaySeconds": 30,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "securityContext": overlay.CONFINED,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": volumes.mounts(spec),
    }
