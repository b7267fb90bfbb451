"""Volumes that a user gives to a pod, and where they are mounted. What Everloop has there has a reserved name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .schema import (
    SUBDOMAIN_PATTERN,
    AbsolutePath,
    ApiModel,
    LocalReference,
    Name,
    ObjectName,
    Quantity,
    RelativePath,
    begins,
    one_of,
    rules,
)

RESERVED_VOLUMES = ("journal", "models", "token", "run", "tmp")
RESERVED_PREFIX = "everloop-"
"""Volumes and containers of Everloop have these names or names with this beginning."""
RESERVED_MOUNTS = (
    "/dev",
    "/models",
    "/opt/everloop",
    "/proc",
    "/run",
    "/sys",
    "/tmp",  # noqa: S108 - a path in the pod
    "/var/cache/everloop",
    "/var/lib/everloop",
    "/var/run",
)
"""Directories at, below and above which only Everloop and the container runtime mount, except SHARED_MEMORY."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path in the pod


def _above(directories: Iterable[str]) -> set[str]:
    """The directories above these, but for the root."""
    return {
        "/".join(parts[:end]) for parts in (path.split("/") for path in directories) for end in range(2, len(parts))
    }


FileMode = Annotated[int, Field(ge=0, le=0o777)]


class KeyToPath(ApiModel):
    """An entry that becomes a file."""

    key: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="Key of the entry.")
    path: Annotated[RelativePath, Field(min_length=1)] = Field(description="Path of the file in the volume.")


Items = Annotated[tuple[KeyToPath, ...], Field(max_length=16)]


class ConfigMapVolume(ApiModel):
    """Files from a ConfigMap."""

    name: ObjectName = Field(description="Name of the ConfigMap.")
    items: Items = Field(default=(), description="Entries that become files; none for all.")
    optional: bool = Field(default=False, description="Whether the pod starts without it.")


class SecretVolume(ApiModel):
    """Files from a Secret."""

    secret_name: ObjectName = Field(description="Name of the Secret.")
    items: Items = Field(default=(), description="Entries that become files; none for all.")
    optional: bool = Field(default=False, description="Whether the pod starts without it.")
    default_mode: FileMode = Field(default=0o644, description="Permissions of the files, as a decimal number.")


class ProjectedSecret(ApiModel):
    """Files from a Secret, beside others."""

    name: ObjectName = Field(description="Name of the Secret.")
    items: Items = Field(default=(), description="Entries that become files; none for all.")
    optional: bool = Field(default=False, description="Whether the pod starts without it.")


class EmptyDirVolume(ApiModel):
    """An empty directory that goes with the pod."""

    medium: Literal["", "Memory"] = Field(
        default="", description="Memory keeps it in memory, which counts as the container's own."
    )
    size_limit: Quantity | None = Field(default=None, description="How large it may grow; required for Memory.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.medium == '' || has(self.sizeLimit)", "an emptyDir with medium Memory needs a sizeLimit")
        )
    )


class ClaimVolume(ApiModel):
    """A PersistentVolumeClaim."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim.")
    read_only: bool = Field(default=False, description="Whether it is mounted for reading only.")


class TokenSource(ApiModel):
    """A token of the pod's ServiceAccount, for a service outside Kubernetes."""

    audience: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Whom the token is for, for instance `sts.amazonaws.com`."
    )
    expiration_seconds: Annotated[int, Field(ge=600, le=86_400)] = Field(
        default=3600, description="How long a token holds; the kubelet replaces it before that."
    )
    path: Annotated[RelativePath, Field(min_length=1)] = Field(description="Path of the file in the volume.")


class ProjectedSource(ApiModel):
    """Where some of the files come from."""

    config_map: ConfigMapVolume | None = Field(default=None, description="Files from a ConfigMap.")
    secret: ProjectedSecret | None = Field(default=None, description="Files from a Secret.")
    service_account_token: TokenSource | None = Field(default=None, description="A token of the ServiceAccount.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.configMap), has(self.secret), has(self.serviceAccountToken)].filter(x, x).size() == 1",
                "exactly one of configMap, secret and serviceAccountToken",
            )
        )
    )


class ProjectedVolume(ApiModel):
    """Files from several places in one directory."""

    sources: Annotated[tuple[ProjectedSource, ...], Field(min_length=1, max_length=8)] = Field(
        description="The places."
    )
    default_mode: FileMode = Field(default=0o644, description="Permissions of the files, as a decimal number.")


class CsiVolume(ApiModel):
    """A volume that a CSI driver makes for the pod and that goes with it: secrets stores, certificates."""

    driver: Annotated[str, Field(min_length=1, max_length=63, pattern=SUBDOMAIN_PATTERN)] = Field(
        description="Name of the driver."
    )
    read_only: bool = Field(default=False, description="Whether it is mounted for reading only.")
    volume_attributes: Annotated[
        dict[Annotated[str, Field(max_length=253)], Annotated[str, Field(max_length=4096)]], Field(max_length=16)
    ] = Field(default={}, description="What the driver is told.")
    node_publish_secret_ref: LocalReference | None = Field(
        default=None, description="The Secret that the driver is given."
    )


class Volume(ApiModel):
    """A volume that containers of the pod can mount."""

    name: Name = Field(
        description="Its name in the pod; those of Everloop's volumes, and what begins with everloop-, are refused.",
        json_schema_extra=rules(
            (
                f"!(self in {one_of(RESERVED_VOLUMES)} || {begins('self', (RESERVED_PREFIX,))})",
                "a volume of this name is Everloop's",
            )
        ),
    )
    config_map: ConfigMapVolume | None = Field(default=None, description="Files from a ConfigMap.")
    secret: SecretVolume | None = Field(default=None, description="Files from a Secret.")
    empty_dir: EmptyDirVolume | None = Field(default=None, description="An empty directory.")
    persistent_volume_claim: ClaimVolume | None = Field(default=None, description="A PersistentVolumeClaim.")
    projected: ProjectedVolume | None = Field(default=None, description="Files from several places.")
    csi: CsiVolume | None = Field(default=None, description="A volume that a CSI driver makes for this pod.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.configMap), has(self.secret), has(self.emptyDir), has(self.persistentVolumeClaim), "
                "has(self.projected), has(self.csi)].filter(x, x).size() == 1",
                "exactly one of configMap, secret, emptyDir, persistentVolumeClaim, projected and csi",
            )
        )
    )


class VolumeMount(ApiModel):
    """A volume of this overlay, mounted into a container."""

    name: Name = Field(description="Name of a volume in `volumes` of this overlay.")
    mount_path: AbsolutePath = Field(
        description="Where it is mounted; directories of Everloop and of the container runtime are refused, "
        "but for /dev/shm.",
        json_schema_extra=rules(
            (
                f"self == '{SHARED_MEMORY}' || !(self in {one_of({*RESERVED_MOUNTS, *_above(RESERVED_MOUNTS)})} || "
                f"{begins('self', (f'{path}/' for path in RESERVED_MOUNTS))})",
                "this directory is Everloop's or the container runtime's",
            )
        ),
    )
    sub_path: RelativePath = Field(default="", description="Directory or file in the volume; empty for all of it.")
    read_only: bool = Field(default=False, description="Whether it is mounted for reading only.")


VolumeMounts = Annotated[
    tuple[VolumeMount, ...],
    Field(
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["mountPath"]},
    ),
]
