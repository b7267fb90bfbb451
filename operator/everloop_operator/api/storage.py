"""The storage of a TrainingSession: where it recovers from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from . import names
from .s3 import S3Location, S3Uri
from .schema import ApiModel, ObjectName, Quantity, RelativePath, rules

AccessMode = Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]


class JournalClaim(ApiModel):
    """A directory on a PersistentVolumeClaim that outlives pods and nodes."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim, in the namespace of this object.")
    sub_path: RelativePath = Field(
        default="",
        description="Directory on the claim; `<namespace>/<name>` of this object is used below it.",
    )


class JournalClaimTemplate(ApiModel):
    """A PersistentVolumeClaim that the operator makes, named `<name>-journal`; one that is there already is adopted."""

    storage_class_name: Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")] = Field(
        default="", description="StorageClass that provides the volume; empty means the cluster's default class."
    )
    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=3)] = Field(
        default=["ReadWriteMany"],
        description="With ReadWriteMany a lost node is replaced without waiting for its volume to be detached.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    size: Quantity = Field(description="Capacity to ask for, such as `1200Gi`.")
    when_deleted: Literal["Retain", "Delete"] = Field(
        default="Retain",
        description="What becomes of the claim when this object is deleted. A claim that was adopted always stays.",
    )


class JournalSpec(ApiModel):
    """Where journal, snapshots and checkpoints are kept: a claim that is there, or one that the operator makes."""

    claim: JournalClaim | None = Field(
        default=None,
        description="A PersistentVolumeClaim. With access mode ReadWriteMany a lost node is replaced without waiting.",
    )
    claim_template: JournalClaimTemplate | None = Field(
        default=None, description="A PersistentVolumeClaim that the operator makes for this session alone."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.claim) != has(self.claimTemplate)", "exactly one of claim and claimTemplate must be set"),
        )
    )

    def claim_name(self, session: str) -> str:
        """Name of the claim of a session of this name."""
        return self.claim.claim_name if self.claim else session + names.JOURNAL_CLAIM_SUFFIX

    @property
    def sub_path(self) -> str:
        """Directory on the claim."""
        return self.claim.sub_path if self.claim else ""


class S3Copies(S3Location):
    """A place in S3 that outlives the volume."""

    uri: S3Uri = Field(description="`s3://bucket/prefix`; `<namespace>/<name>` of this object is used below it.")
    kms_key_id: Annotated[str, Field(max_length=2048)] = Field(
        default="", description="Key of the key management service that objects are encrypted with (SSE-KMS)."
    )


class CopiesSpec(ApiModel):
    """Copies of checkpoints and of each adapter's newest snapshot, made in the background."""

    s3: S3Copies = Field(description="Where they are made.")


class ModelCacheClaim(ApiModel):
    """A PersistentVolumeClaim for the files of base models."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim, in the namespace of this object.")


class ModelCacheSpec(ApiModel):
    """Where base models from Hugging Face or S3 are kept once they have come."""

    claim: ModelCacheClaim = Field(
        description="A claim that pods may write to; several sessions may share it. Its file system must have flock."
    )


class StorageSpec(ApiModel):
    """Storage that the session recovers from."""

    journal: JournalSpec = Field(
        description="Where journal, snapshots and checkpoints are kept. Immutable.",
        json_schema_extra=rules(("self == oldSelf", "spec.storage.journal is immutable")),
    )
    copies: CopiesSpec | None = Field(
        default=None,
        description="Copies outside the volume. An empty volume is filled from them: checkpoints are there again, and "
        "each model says how far it goes. A change starts a new attempt.",
    )
    model_cache: ModelCacheSpec | None = Field(
        default=None,
        description="For base models from Hugging Face or S3: fetched into it once, before the trainer starts, and "
        "read from there without a network. A change starts a new attempt.",
    )
    allow_node_local: bool = Field(
        default=False,
        description="Whether the journal may lie on a volume that only one node has. What is on it is lost with that "
        "node. A change takes effect at once.",
    )
