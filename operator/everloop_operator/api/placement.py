"""Which nodes a pod may run on: tolerations, affinity and spread, as in a pod but trimmed to what bounds the schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .schema import ApiModel, Labels, LabelValue, one_of, rules

Key = Annotated[str, Field(min_length=1, max_length=317)]
"""Key of a label or taint: at most 253 characters of prefix, `/`, 63 of name."""
Weight = Annotated[int, Field(ge=1, le=100)]


LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""For how long a pod stays on a node with these is decided by the operator alone."""


class Toleration(ApiModel):
    """A taint that keeps no pod of this object off a node."""

    key: Annotated[str, Field(max_length=317)] = Field(
        default="", description="Key of the taint; empty, with operator Exists, for every taint."
    )
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="Whether `value` has to be the taint's.")
    value: LabelValue = Field(default="", description="Value of the taint; empty with operator Exists.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="", description="Effect of the taint; empty for every effect."
    )
    toleration_seconds: Annotated[int, Field(ge=0, le=604_800)] | None = Field(
        default=None,
        description="For how long a pod stays after a taint with effect NoExecute has come; absent: until the operator "
        "moves it. Not for the taints of lost nodes.",
    )


class NodeSelectorRequirement(ApiModel):
    """A condition on a node's label."""

    key: Key = Field(description="Key of the label.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field(description="How it is compared.")
    values: Annotated[tuple[LabelValue, ...], Field(max_length=64)] = Field(
        default=(), description="What it is compared with; none for Exists and DoesNotExist."
    )


class NodeSelectorTerm(ApiModel):
    """Conditions of which all must hold."""

    match_expressions: Annotated[tuple[NodeSelectorRequirement, ...], Field(min_length=1, max_length=16)] = Field(
        description="Conditions on the node's labels, all of which must hold."
    )


class NodeSelector(ApiModel):
    """Terms of which one must hold."""

    node_selector_terms: Annotated[tuple[NodeSelectorTerm, ...], Field(min_length=1, max_length=8)] = Field(
        description="Terms, one of which must hold."
    )


class PreferredNodes(ApiModel):
    """Nodes that are better than others."""

    weight: Weight = Field(description="How much better, 1 to 100.")
    preference: NodeSelectorTerm = Field(description="The nodes.")


class NodeAffinity(ApiModel):
    """Nodes that a pod must or should run on."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = Field(
        default=None, description="Nodes that it must run on; the nodes that Everloop avoids are left out of them."
    )
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredNodes, ...], Field(max_length=16)
    ] = Field(default=(), description="Nodes that it should run on.")


class LabelSelectorRequirement(ApiModel):
    """A condition on a pod's label."""

    key: Key = Field(description="Key of the label.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="How it is compared.")
    values: Annotated[tuple[LabelValue, ...], Field(max_length=64)] = Field(
        default=(), description="What it is compared with; none for Exists and DoesNotExist."
    )


class LabelSelector(ApiModel):
    """Pods by their labels; all conditions must hold."""

    match_labels: Labels = Field(default={}, description="Labels that they have.")
    match_expressions: Annotated[tuple[LabelSelectorRequirement, ...], Field(max_length=16)] = Field(
        default=(), description="Further conditions on their labels."
    )


class PodAffinityTerm(ApiModel):
    """Pods, and what counts as being at the same place as they are."""

    label_selector: LabelSelector = Field(description="The pods.")
    topology_key: Key = Field(description="Label of nodes; nodes of one value are one place.")
    namespaces: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=63)], ...], Field(max_length=16)] = Field(
        default=(), description="Namespaces of the pods; none for that of this object."
    )


class WeightedPodAffinityTerm(ApiModel):
    """A place that is better or worse than others."""

    weight: Weight = Field(description="How much, 1 to 100.")
    pod_affinity_term: PodAffinityTerm = Field(description="The place.")


class PodAffinity(ApiModel):
    """Places by the pods that are there."""

    required_during_scheduling_ignored_during_execution: Annotated[tuple[PodAffinityTerm, ...], Field(max_length=8)] = (
        Field(default=(), description="What must hold.")
    )
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[WeightedPodAffinityTerm, ...], Field(max_length=8)
    ] = Field(default=(), description="What should hold.")


class Affinity(ApiModel):
    """Where a pod runs, by nodes and by other pods."""

    node_affinity: NodeAffinity | None = Field(default=None, description="Nodes to run on.")
    pod_affinity: PodAffinity | None = Field(default=None, description="Pods to run beside.")
    pod_anti_affinity: PodAffinity | None = Field(default=None, description="Pods not to run beside.")


class TopologySpreadConstraint(ApiModel):
    """How evenly pods are spread over places."""

    max_skew: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="By how many pods a place may exceed the emptiest."
    )
    topology_key: Key = Field(description="Label of nodes; nodes of one value are one place.")
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        description="What happens where it can't be."
    )
    label_selector: LabelSelector = Field(description="The pods that are counted.")


Tolerations = Annotated[
    tuple[Toleration, ...],
    Field(
        max_length=32,
        json_schema_extra=rules(
            (
                "self.all(t, t.operator == 'Equal' ? t.key != '' : t.value == '')",
                "a toleration with operator Equal needs a key, one with operator Exists has no value",
            ),
            (
                "self.all(t, !has(t.tolerationSeconds) || "
                f"(t.effect == 'NoExecute' && t.key != '' && !(t.key in {one_of(LOST_NODE_TAINTS)})))",
                "tolerationSeconds needs a key and effect NoExecute, and is not for the taints of lost nodes",
            ),
        ),
    ),
]
