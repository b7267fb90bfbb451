"""The storage of a TrainingSession: where it recovers from."""

from __future__ import annotations

from pydantic import Field

from .schema import ApiModel, ObjectName, RelativePath, rules


class JournalClaim(ApiModel):
    """A directory on a PersistentVolumeClaim that outlives pods and nodes."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim, in the namespace of this object.")
    sub_path: RelativePath = Field(
        default="",
        description="Directory on the claim; `<namespace>/<name>` of this object is used below it.",
    )


class JournalSpec(ApiModel):
    """Where journal, snapshots and checkpoints are kept."""

    claim: JournalClaim = Field(
        description="A PersistentVolumeClaim. With access mode ReadWriteMany a lost node is replaced without waiting."
    )


class StorageSpec(ApiModel):
    """Storage that the session recovers from."""

    journal: JournalSpec = Field(
        description="Where journal, snapshots and checkpoints are kept. Immutable.",
        json_schema_extra=rules(("self == oldSelf", "spec.storage.journal is immutable")),
    )
