"""Builds what belongs to an RLJob: the driver pod of an attempt, its secrets, and the session of a template."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everloop_operator.api import names
from everloop_operator.api.rl_job import RLJobSpec, SessionTemplate
from everloop_operator.core import evictions, overlay
from everloop_operator.core.elsewhere import other_than

from .observed import Job
from .report import Point

STORAGE_MOUNT = "/var/lib/everloop"
STATE_MOUNT = "/var/lib/everloop/state"
TOKEN_MOUNT = "/run/secrets/everloop"  # noqa: S105 - a path
TERMINATION_LOG = "/dev/termination-log"

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a driver pod finds what it needs."""

    claim: str
    """Name of the claim of the session's journal, on which the job has a directory of its own."""
    sub_path: str
    """Directory of all sessions on the claim."""
    endpoint: str
    """Address of the gateway."""
    reader_image: str
    """The installation's image, which holds the progress reader."""
    evicted_after: int | None = None
    """Seconds on a lost node after which Kubernetes evicts the driver; None for never."""


def pod_name(job: str, attempt: int) -> str:
    """Name of the driver pod of an attempt."""
    return f"{job}-driver-a{attempt}"


def secret_name(job: str, attempt: int) -> str:
    """Name of the secret of an attempt."""
    return f"{job}-driver-a{attempt}"


def directory(job: Job) -> str:
    """The job's directory below the journal's.

    `_jobs` is no name of a TrainingSession, and the UID keeps a job that is created anew from its predecessor's state.
    """
    return f"{job.namespace}/_jobs/{job.name}-{job.uid}"


def template_hash(spec: RLJobSpec) -> str:
    """Hash over everything of the spec that a running driver can't take over; defaults are left out."""
    inputs = spec.model_dump(mode="json", by_alias=True, include={"runner", "seed"}, exclude_defaults=True)
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def resume_text(point: Point) -> str:
    """The value of the annotation that tells what a driver was given."""
    return f"{point.iteration} {point.checkpoint}"


def start_point(spec: RLJobSpec) -> Point:
    """What the first driver goes on from."""
    return Point(checkpoint=spec.start.checkpoint.uri) if spec.start else Point()


def pod(job: Job, spec: RLJobSpec, attempt: int, resume: Point, place: Place, shun: Sequence[str]) -> Body:
    """The driver pod of an attempt; it prefers other nodes than the hostnames of `shun`.

    The progress reader is a sidecar: it starts before the driver, which it holds back while the storage knows a newer
    checkpoint than `resume`, and ends after it.
    """
    pod_spec: Body = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.runner.termination_grace_period_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": evictions.tolerations(place.evicted_after),
        "initContainers": [_reader(job, spec, attempt, resume, place)],
        "containers": [_driver(job, spec, attempt, resume, place)],
        "volumes": [
            {"name": "journal", "persistentVolumeClaim": {"claimName": place.claim}},
            {
                "name": "token",
                "secret": {
                    "secretName": secret_name(job.name, attempt),
                    "items": [{"key": names.TOKEN_FIELD, "path": names.TOKEN_FIELD}],
                    "defaultMode": 0o440,
                },
            },
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if shun:
        preferred = [{"weight": 100, "preference": other_than(shun)}]
        pod_spec["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    metadata = _metadata(job, pod_name(job.name, attempt), attempt)
    metadata["annotations"] = {
        names.ANNOTATION_TEMPLATE_HASH: template_hash(spec),
        names.ANNOTATION_RESUME: resume_text(resume),
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        # A pod that is not restarted in place would look unfinished to Argo CD for ever.
        "argocd.argoproj.io/ignore-restart-policy": "true",
    }
    return overlay.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}, spec.runner.pod)


def _reader(job: Job, spec: RLJobSpec, attempt: int, resume: Point, place: Place) -> Body:
    mount: Body = {"name": "journal", "mountPath": STORAGE_MOUNT}
    if place.sub_path:
        mount["subPath"] = place.sub_path
    return {
        "name": names.PROGRESS_CONTAINER,
        "image": place.reader_image,
        "restartPolicy": "Always",
        "args": ["-m", "everloop_progress"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
            {"name": "EVERLOOP_JOB_DIR", "value": f"{STORAGE_MOUNT}/{directory(job)}"},
            {"name": "EVERLOOP_ATTEMPT", "value": str(attempt)},
            *_resume_variables(resume),
            {"name": "EVERLOOP_START_FROM", "value": start_point(spec).checkpoint},
            {"name": "EVERLOOP_TOKEN_FILE", "value": f"{TOKEN_MOUNT}/{names.TOKEN_FIELD}"},
            {"name": "EVERLOOP_LAST_WORDS", "value": TERMINATION_LOG},
        ],
        "ports": [{"name": "progress", "containerPort": names.PROGRESS_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        # The driver starts when this succeeds: once the storage was read, and holds nothing newer than `resume`.
        "startupProbe": {
            "httpGet": {"path": "/startz", "port": "progress", "scheme": "HTTP"},
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": 3600,
        },
        "securityContext": overlay.CONFINED,
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": [mount, {"name": "token", "mountPath": TOKEN_MOUNT, "readOnly": True}],
    }


def _driver(job: Job, spec: RLJobSpec, attempt: int, resume: Point, place: Place) -> Body:
    runner = spec.runner
    below = (place.sub_path, directory(job), f"a{attempt}")
    environment: dict[str, Body] = {
        "HOME": {"value": "/tmp"},  # noqa: S108 - a mount of its own
        "TMPDIR": {"value": "/tmp"},  # noqa: S108 - as above
    }
    for variable in runner.env:
        source = variable.value_from
        environment[variable.name] = (
            {"valueFrom": source.model_dump(mode="json", by_alias=True, exclude_none=True)}
            if source
            else {"value": variable.value}
        )
    key = {"name": secret_name(job.name, attempt), "key": names.API_KEY_FIELD}
    environment |= {
        "TINKER_BASE_URL": {"value": place.endpoint},
        "TINKER_API_KEY": {"valueFrom": {"secretKeyRef": key}},
        "EVERLOOP_STATE_DIR": {"value": STATE_MOUNT},
    }
    if spec.seed is not None:
        environment["EVERLOOP_SEED"] = {"value": str(spec.seed)}
    return {
        "name": names.DRIVER_CONTAINER,
        "image": runner.image,
        "command": list(runner.command),
        "args": list(runner.args),
        "env": [*({"name": name, **value} for name, value in environment.items()), *_resume_variables(resume)],
        "resources": runner.resources.model_dump(mode="json", by_alias=True),
        "securityContext": overlay.CONFINED,
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "journal", "mountPath": STATE_MOUNT, "subPath": "/".join(filter(None, below))},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount of its own
        ],
    }


def _resume_variables(resume: Point) -> list[Body]:
    return [
        {"name": "EVERLOOP_RESUME_FROM", "value": resume.checkpoint},
        {"name": "EVERLOOP_RESUME_ITERATION", "value": str(resume.iteration)},
    ]


def driver_secret(job: Job, attempt: int, token: str, key: str) -> Body:
    """The secret of an attempt: the token of its progress reader, and the API key of its driver."""
    metadata = _metadata(job, secret_name(job.name, attempt), attempt)
    metadata["labels"][names.LABEL_TYPE] = names.TYPE_DRIVER
    data = {names.TOKEN_FIELD: _encoded(token), names.API_KEY_FIELD: _encoded(key)}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}


def key_secret(job: Job, spec: RLJobSpec, key: str, release_namespace: str) -> Body:
    """What the gateway knows the job's API key by. The next attempt's takes its place, and closes it."""
    fields = {
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "namespace": job.namespace,
        "subject": f"rljob:{job.namespace}:{job.name}",
        "session": job.session_name,
        "checkpoint": start_point(spec).checkpoint,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": key_secret_name(key.split("-")[1]),
            "namespace": release_namespace,
            "labels": {
                names.LABEL_TYPE: names.TYPE_API_KEY,
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
                names.LABEL_JOB_UID: job.uid,
            },
        },
        "data": {name: _encoded(value) for name, value in fields.items()},
    }


def key_secret_name(key_id: str) -> str:
    """Name of the Secret of an API key, as the gateway reads it."""
    return f"key-{key_id}"


def session(job: Job, template: SessionTemplate, *, rests: bool) -> Body:
    """The TrainingSession of a template, owned by the job; it holds no GPU while the job rests or has finished."""
    spec = template.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    metadata: Body = {
        "name": job.name,
        "namespace": job.namespace,
        "labels": {**template.metadata.labels, names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_JOB: job.name},
        "ownerReferences": [_owner(job)],
    }
    if template.metadata.annotations:
        metadata["annotations"] = dict(template.metadata.annotations)
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.TRAINING_SESSION_KIND,
        "metadata": metadata,
        "spec": {**spec, "suspend": rests or template.spec.suspend},
    }


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _owner(job: Job) -> Body:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.RL_JOB_KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _metadata(job: Job, name: str, attempt: int) -> Body:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {
            "app.kubernetes.io/name": "everloop",
            "app.kubernetes.io/instance": job.name,
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            names.LABEL_COMPONENT: names.COMPONENT_DRIVER,
            names.LABEL_JOB: job.name,
            names.LABEL_ATTEMPT: str(attempt),
        },
        "ownerReferences": [_owner(job)],
    }
