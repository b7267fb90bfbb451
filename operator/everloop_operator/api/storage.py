"""The storage of a TrainingSession: where it recovers from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from . import names
from .schema import ApiModel, ObjectName, OptionalName, Quantity, RelativePath, rules

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


class S3Copies(ApiModel):
    """A place in S3, or in a store that speaks its protocol, that outlives the volume."""

    uri: Annotated[str, Field(max_length=1024, pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)*$")] = Field(
        description="`s3://bucket/prefix`; `<namespace>/<name>` of this object is used below it."
    )
    region: Annotated[str, Field(max_length=64)] = Field(
        default="", description="Region of the bucket; empty: as the pod's environment says."
    )
    kms_key_id: Annotated[str, Field(max_length=2048)] = Field(
        default="", description="Key of the key management service that objects are encrypted with (SSE-KMS)."
    )
    endpoint_url: Annotated[str, Field(max_length=1024, pattern=r"^(https?://[^/\s]+(/\S*)?)?$")] = Field(
        default="", description="Address of a store that speaks S3's protocol; empty: Amazon S3."
    )
    credentials_secret_name: OptionalName = Field(
        default="",
        description="Secret of this namespace with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for credentials that "
        "expire, AWS_SESSION_TOKEN; read anew for every request. Empty: what the pod's ServiceAccount or node has.",
    )


class CopiesSpec(ApiModel):
    """Copies of checkpoints and of each adapter's newest snapshot, made in the background."""

    s3: S3Copies = Field(description="Where they are made.")


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
    allow_node_local: bool = Field(
        default=False,
        description="Whether the journal may lie on a volume that only one node has. What is on it is lost with that "
        "node. A change takes effect at once.",
    )
