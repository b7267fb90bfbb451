"""What a user may say about a pod: a closed list of fields, so that what Everloop owns can't be named.

Restart policy, host namespaces, host paths, ports, privileges and Everloop's own containers have no field here. Names
that the two could share (labels, environment, volumes, mounts, containers) are kept apart by the rules below: what
Everloop adds to a pod has one of the reserved names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from . import names
from .placement import Affinity, Tolerations, TopologySpreadConstraint
from .pod_volumes import RESERVED_PREFIX, Volume, VolumeMounts
from .schema import (
    LABEL_KEYS,
    ApiModel,
    ContainerResources,
    Labels,
    LabelValue,
    LocalReference,
    Name,
    ObjectName,
    OptionalName,
    begins,
    one_of,
    rules,
)

RESERVED_KEYS = ("everloop.dev/", "app.kubernetes.io/")
"""Beginnings of labels and annotations that only Everloop sets."""
UNSAFE_ANNOTATIONS = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
)
"""Beginnings of annotations that could lift a container's confinement."""
RESERVED_ENVIRONMENT = ("HOME", "NODE_NAME", "POD_IP", "POD_NAME", "POD_UID", "TMPDIR")
RESERVED_ENVIRONMENT_PREFIXES = ("EVERLOOP_", "PYTHON")
_LARGEST_ID = 2_147_483_647


def _confined(annotations: dict[str, str]) -> dict[str, str]:
    for key in annotations:
        if key.startswith((*RESERVED_KEYS, *UNSAFE_ANNOTATIONS)):
            raise ValueError(f"{key} is reserved")
    return annotations


UserOrGroup = Annotated[int, Field(ge=1, le=_LARGEST_ID)]
Words = Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=64)]


class KeyReference(ApiModel):
    """One entry of a Secret or ConfigMap of the namespace."""

    name: ObjectName = Field(description="Name of the object.")
    key: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="Key of the entry.")
    optional: bool = Field(default=False, description="Whether the pod starts without it.")


class FieldReference(ApiModel):
    """A field of the pod itself."""

    field_path: Annotated[str, Field(min_length=1, max_length=400)] = Field(
        description="The field, for instance `metadata.labels['team']`."
    )


class EnvironmentSource(ApiModel):
    """Where the value of a variable comes from."""

    secret_key_ref: KeyReference | None = Field(default=None, description="An entry of a Secret.")
    config_map_key_ref: KeyReference | None = Field(default=None, description="An entry of a ConfigMap.")
    field_ref: FieldReference | None = Field(default=None, description="A field of the pod.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(x, x).size() == 1",
                "exactly one of secretKeyRef, configMapKeyRef and fieldRef",
            )
        )
    )


class EnvironmentVariable(ApiModel):
    """A variable of a container's environment."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        description="Its name; those that Everloop sets, and those that begin with EVERLOOP_ or PYTHON, are refused.",
        json_schema_extra=rules(
            (
                f"!(self in {one_of(RESERVED_ENVIRONMENT)} || {begins('self', RESERVED_ENVIRONMENT_PREFIXES)})",
                "a variable of this name is set by Everloop",
            )
        ),
    )
    value: Annotated[str, Field(max_length=32_768)] = Field(default="", description="Its value.")
    value_from: EnvironmentSource | None = Field(
        default=None, description="Where its value comes from, if not `value`."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(("self.value == '' || !has(self.valueFrom)", "only one of value and valueFrom"))
    )


Environment = Annotated[
    tuple[EnvironmentVariable, ...],
    Field(
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
]


class InitContainer(ApiModel):
    """A container that starts before the trainer, with no more rights than the trainer has.

    It runs to its end first, or beside the trainer for as long as that runs (a sidecar).
    """

    name: Name = Field(
        description="Its name; `trainer`, and names that begin with everloop-, are refused.",
        json_schema_extra=rules(
            (
                f"!(self == '{names.TRAINER_CONTAINER}' || {begins('self', (RESERVED_PREFIX,))})",
                "a container of this name is Everloop's",
            )
        ),
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] = Field(description="Its image.")
    restart_policy: Literal["", "Always"] = Field(
        default="",
        description="Always makes it a sidecar: what comes after it starts once it runs, it is started again when it "
        "ends, and it is stopped after the trainer. Empty: it ends before the trainer starts.",
    )
    command: Words = Field(default=(), description="Its program; none for the image's.")
    args: Words = Field(default=(), description="Arguments of its program; none for the image's.")
    env: Environment = Field(default=(), description="Its environment.")
    resources: ContainerResources = Field(default=ContainerResources(), description="Its requests and limits.")
    volume_mounts: VolumeMounts = Field(default=(), description="Its mounts; `/tmp` is writable anyway.")


class PodSecurity(ApiModel):
    """Who the pod's processes are. Everything else is as the restricted Pod Security Standard wants it."""

    run_as_user: UserOrGroup = Field(default=1000, description="User and first group of all processes; never root.")
    fs_group: UserOrGroup = Field(
        default=1000,
        description="Group that volumes are given to, where their kind of volume does that and their root has another.",
    )


OwnLabels = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=32,
        json_schema_extra=rules(
            LABEL_KEYS,
            (
                f"self.all(k, !({begins('k', RESERVED_KEYS)}))",
                "labels that begin with everloop.dev/ or app.kubernetes.io/ are Everloop's",
            ),
        ),
    ),
]
Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(
        max_length=32,
        json_schema_extra=rules(
            LABEL_KEYS,
            (
                f"self.all(k, !({begins('k', (*RESERVED_KEYS, *UNSAFE_ANNOTATIONS))}))",
                "annotations of Everloop, and those that lift a container's confinement, are refused",
            ),
        ),
    ),
    AfterValidator(_confined),
]


MOUNTS_ARE_VOLUMES = (
    "!has(self.volumeMounts) || self.volumeMounts.all(m, "
    "has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
    "every name in volumeMounts must be one of volumes",
)


class PodAdditions(ApiModel):
    """What any pod may have beside what Everloop gives it. A change starts a new attempt."""

    labels: OwnLabels = Field(default={}, description="Labels of the pod.")
    annotations: Annotations = Field(default={}, description="Annotations of the pod.")
    service_account_name: OptionalName = Field(
        default="", description="ServiceAccount; its token is mounted for nobody. Empty: `default`."
    )
    image_pull_secrets: Annotated[
        tuple[LocalReference, ...],
        Field(
            max_length=8, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        ),
    ] = Field(default=(), description="Secrets with which images are pulled.")
    node_selector: Labels = Field(default={}, description="Labels of the nodes that the pod may run on.")
    tolerations: Tolerations = Field(default=(), description="Taints that keep the pod off no node.")
    priority_class_name: OptionalName = Field(default="", description="PriorityClass; empty for the cluster's default.")
    runtime_class_name: OptionalName = Field(default="", description="RuntimeClass; empty for the cluster's default.")
    scheduler_name: OptionalName = Field(default="", description="Scheduler; empty for the cluster's default.")
    volumes: Annotated[
        tuple[Volume, ...],
        Field(
            max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        ),
    ] = Field(default=(), description="Volumes of the pod, beside Everloop's.")
    volume_mounts: VolumeMounts = Field(
        default=(), description="Mounts of the trainer, or of the driver, beside Everloop's."
    )
    security_context: PodSecurity = Field(default=PodSecurity(), description="Who the pod's processes are.")

    model_config = ConfigDict(json_schema_extra=rules(MOUNTS_ARE_VOLUMES))


class PodOverlay(PodAdditions):
    """What a session pod has beside what Everloop gives it. A change starts a new attempt."""

    affinity: Affinity | None = Field(default=None, description="Where the pod runs, by nodes and other pods.")
    topology_spread_constraints: Annotated[tuple[TopologySpreadConstraint, ...], Field(max_length=8)] = Field(
        default=(), description="How evenly pods are spread."
    )
    env: Environment = Field(default=(), description="Environment of the trainer container, beside Everloop's.")
    init_containers: Annotated[
        tuple[InitContainer, ...],
        Field(
            max_length=4, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        ),
    ] = Field(default=(), description="Containers that start before the trainer, one after another; sidecars too.")
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=7200)] = Field(
        default=120,
        description="Seconds that a pod has from SIGTERM until it is killed; more than its snapshots take.",
    )
    disruption_budget: bool = Field(
        default=False,
        description="Whether a PodDisruptionBudget holds evictions back. A drain then waits until the session has "
        "moved, and a node that is cordoned for a minute is left as with severity CheckpointThenMove.",
    )
    model_config = ConfigDict(
        json_schema_extra=rules(
            MOUNTS_ARE_VOLUMES,
            (
                "!has(self.initContainers) || self.initContainers.all(c, !has(c.volumeMounts) || "
                "c.volumeMounts.all(m, has(self.volumes) && self.volumes.exists(v, v.name == m.name)))",
                "every name in volumeMounts of initContainers must be one of volumes",
            ),
        )
    )
