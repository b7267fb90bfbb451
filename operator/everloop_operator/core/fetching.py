"""The init container that fills the model cache with a base model from Hugging Face or S3, and how it does."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec

from .aspect import Aspect
from .observed import Pod
from .report import TrainerReport
from .volumes import MODELS_MOUNT, SCRATCH_MOUNT, SOURCE_MOUNT, SOURCE_VOLUME, TOKEN_MOUNT, source_secret

TOKEN_KEY = "token"  # noqa: S105 - the name of a field
MESSAGE = 600
Body = dict[str, Any]


def model_path(spec: TrainingSessionSpec) -> str:
    """The directory of the base model in the pod: what a source is called there depends on nothing but its name."""
    source = spec.base_model.source
    path = ""
    if source.claim:
        path = source.claim.path
    elif source.hugging_face:
        revision = source.hugging_face.revision.replace("/", "--")
        path = f"huggingface/{source.hugging_face.repo.replace('/', '--')}/{revision}"
    elif source.s3:
        place = f"{source.s3.endpoint_url} {source.s3.uri}"
        path = f"s3/{hashlib.sha256(place.encode()).hexdigest()[:16]}"
    return f"{MODELS_MOUNT}/{path}" if path else MODELS_MOUNT


def config(spec: TrainingSessionSpec) -> Body:
    """What the container reads from `EVERLOOP_FETCH`. Holds no secret."""
    source, mounted = spec.base_model.source, SOURCE_MOUNT if source_secret(spec) else ""
    body: Body = {"format": 1, "directory": model_path(spec)}
    if source.hugging_face:
        token = f"{mounted}/{TOKEN_KEY}" if mounted else ""
        hub = source.hugging_face
        body["huggingFace"] = {"repo": hub.repo, "revision": hub.revision, "tokenFile": token}
    elif source.s3:
        s3 = source.s3
        place = {"uri": s3.uri, "region": s3.region, "endpointUrl": s3.endpoint_url}
        body["s3"] = {**place, "credentialsDir": mounted}
    return body


def init_containers(spec: TrainingSessionSpec, image: str, security: Body) -> list[Body]:
    """The container, where the base model is not on a claim of its own already.

    It has the trainer's share of what a quota may count; of devices it needs none.
    """
    if spec.base_model.source.claim:
        return []
    resources = spec.workers.resources.model_dump(mode="json", by_alias=True)
    secret = [{"name": SOURCE_VOLUME, "mountPath": SOURCE_MOUNT, "readOnly": True}] if source_secret(spec) else []
    return [
        {
            "name": names.FETCH_CONTAINER,
            "image": image,
            "args": ["fetch"],
            "env": [
                {"name": "EVERLOOP_FETCH", "value": json.dumps(config(spec), sort_keys=True, separators=(",", ":"))},
                {"name": "TMPDIR", "value": SCRATCH_MOUNT["mountPath"]},
                {"name": "EVERLOOP_TOKEN_FILE", "value": f"{TOKEN_MOUNT}/{names.TOKEN_FIELD}"},
                *(
                    {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
                    for name, path in (("POD_IP", "status.podIP"), ("POD_NAME", "metadata.name"))
                ),
            ],
            "resources": {
                kind: {name: quantity for name, quantity in values.items() if "/" not in name}
                for kind, values in resources.items()
            },
            "securityContext": security,
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "models", "mountPath": MODELS_MOUNT},
                {"name": "token", "mountPath": TOKEN_MOUNT, "readOnly": True},
                *secret,
                SCRATCH_MOUNT,
            ],
        }
    ]


def progress(report: TrainerReport | None) -> str:
    """How far it is, in steps of 10 %: each is a write of the status."""
    if report is None or report.fetching is None:
        return f"container {names.FETCH_CONTAINER} logs how far it is"
    return f"{report.fetching.percent // 10 * 10} % of {_size(report.fetching.total_bytes)}"


def _size(count: int) -> str:
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def judge(pod: Pod | None, report: TrainerReport | None) -> Aspect | None:
    """Condition BaseModelReady of a pod whose base model is still to come; None once it is there, or need not come."""
    if pod is None or pod.fetch.exit_code == 0:
        return None
    failed = ""
    if pod.fetch.exit_code is not None:
        failed = pod.fetch.exit_message[-MESSAGE:] or f"exit code {pod.fetch.exit_code}"
    if pod.fetch.running:
        last = f"; the last try: {failed}" if failed else ""
        message = f"pod {pod.name} fetches the base model: {progress(report)}{last}"
        return Aspect(False, names.REASON_BASE_MODEL_FETCHING, message)
    return Aspect(False, names.REASON_BASE_MODEL_FETCH_FAILED, f"pod {pod.name}: {failed}") if failed else None
