"""The volumes of a session pod: claims and secrets, where they are mounted, and the claim that the operator makes."""

from __future__ import annotations

from typing import Any

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec

from .observed import Session

JOURNAL_MOUNT = "/var/lib/everloop"
MODELS_MOUNT = "/models"
TOKEN_MOUNT = "/run/secrets/everloop"  # noqa: S105 - a path
S3_MOUNT = "/run/secrets/everloop-s3"
SOURCE_MOUNT = "/run/secrets/everloop-source"
SOURCE_VOLUME = "everloop-source"
RUN_DIRECTORY = "/run/everloop"
SCRATCH_VOLUME = "tmp"
SCRATCH_MOUNT = {"name": SCRATCH_VOLUME, "mountPath": "/tmp"}  # noqa: S108 - a mount of its own

Body = dict[str, Any]


def models_claim(spec: TrainingSessionSpec) -> str:
    """Name of the claim with the files of the base model."""
    if spec.base_model.source.claim:
        return spec.base_model.source.claim.claim_name
    assert spec.storage.model_cache is not None, "the schema asks for it where the source is none"
    return spec.storage.model_cache.claim.claim_name


def source_secret(spec: TrainingSessionSpec) -> str:
    """Name of the Secret that the source of the base model asks for; '' if none."""
    source = spec.base_model.source
    if source.hugging_face:
        return source.hugging_face.token_secret_name
    return source.s3.credentials_secret_name if source.s3 else ""


def mounts(spec: TrainingSessionSpec) -> list[Body]:
    """Mounts of the trainer container."""
    journal: Body = {"name": "journal", "mountPath": JOURNAL_MOUNT}
    if spec.storage.journal.sub_path:
        journal["subPath"] = spec.storage.journal.sub_path
    secret = [{"name": "everloop-s3", "mountPath": S3_MOUNT, "readOnly": True}] if _s3_secret(spec) else []
    return [
        journal,
        {"name": "models", "mountPath": MODELS_MOUNT, "readOnly": True},
        {"name": "token", "mountPath": TOKEN_MOUNT, "readOnly": True},
        *secret,
        {"name": "run", "mountPath": RUN_DIRECTORY},
        SCRATCH_MOUNT,
    ]


def volumes(session: str, spec: TrainingSessionSpec, token_secret: str) -> list[Body]:
    """Volumes of the pod. A Secret is mounted whole, so that what is written to it later is seen."""
    secrets = {"everloop-s3": _s3_secret(spec), SOURCE_VOLUME: source_secret(spec)}
    return [
        {"name": "journal", "persistentVolumeClaim": {"claimName": spec.storage.journal.claim_name(session)}},
        {"name": "models", "persistentVolumeClaim": {"claimName": models_claim(spec)}},
        {"name": "token", "secret": {"secretName": token_secret, "defaultMode": 0o440}},
        *(
            {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}
            for name, secret in secrets.items()
            if secret
        ),
        {"name": "run", "emptyDir": {}},
        {"name": SCRATCH_VOLUME, "emptyDir": {}},
    ]


def _s3_secret(spec: TrainingSessionSpec) -> str:
    return spec.storage.copies.s3.credentials_secret_name if spec.storage.copies else ""


def journal_claim(session: Session, spec: TrainingSessionSpec) -> Body | None:
    """The claim of spec.storage.journal.claimTemplate. Only one that is to go with the session is owned by it."""
    template = spec.storage.journal.claim_template
    if template is None:
        return None
    metadata: Body = {
        "name": spec.storage.journal.claim_name(session.name),
        "namespace": session.namespace,
        "labels": {
            "app.kubernetes.io/name": "everloop",
            "app.kubernetes.io/instance": session.name,
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            names.LABEL_SESSION: session.name,
        },
    }
    if template.when_deleted == "Delete":
        owner = {"apiVersion": names.API_VERSION, "kind": names.TRAINING_SESSION_KIND}
        metadata["ownerReferences"] = [{**owner, "name": session.name, "uid": session.uid, "controller": True}]
    claim: Body = {
        "accessModes": list(template.access_modes),
        "resources": {"requests": {"storage": template.size}},
    }
    if template.storage_class_name:
        claim["storageClassName"] = template.storage_class_name
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim}
