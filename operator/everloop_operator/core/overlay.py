"""Adds to a pod what its user asks for in `spec.pod`. What Everloop has put there stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everloop_operator.api.pod_overlay import InitContainer, PodOverlay
from everloop_operator.api.schema import ApiModel

from .volumes import SCRATCH_MOUNT

Body = dict[str, Any]

CONFINED: Body = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Security context of every container; the pod's own has the rest of the restricted Pod Security Standard."""
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def lay(body: Body, overlay: PodOverlay) -> Body:
    """The pod `body` with the overlay. Lists are joined, and no label of ours changes."""
    metadata, spec = body["metadata"], body["spec"]
    trainer, *others = spec["containers"]
    trainer = {
        **trainer,
        "env": [*trainer["env"], *_dumped(overlay.env)],
        "volumeMounts": [*trainer["volumeMounts"], *_dumped(overlay.volume_mounts)],
    }
    merged = {
        **spec,
        **_placement(spec, overlay),
        "terminationGracePeriodSeconds": overlay.termination_grace_period_seconds,
        "securityContext": {
            **spec["securityContext"],
            "runAsUser": overlay.security_context.run_as_user,
            "runAsGroup": overlay.security_context.run_as_user,
            "fsGroup": overlay.security_context.fs_group,
        },
        "containers": [trainer, *others],
        "volumes": [*spec["volumes"], *_dumped(overlay.volumes)],
    }
    own = [{**each, "env": [*each["env"], *_dumped(overlay.env)]} for each in spec.get("initContainers", ())]
    init = [*map(_init_container, overlay.init_containers), *own]
    if init:
        merged["initContainers"] = init
    references = {
        "serviceAccountName": overlay.service_account_name,
        "imagePullSecrets": _dumped(overlay.image_pull_secrets),
        "runtimeClassName": overlay.runtime_class_name,
        "priorityClassName": overlay.priority_class_name,
    }
    merged |= {field: value for field, value in references.items() if value}
    metadata = {
        **metadata,
        "labels": {**overlay.labels, **metadata["labels"]},
        # The user may think otherwise about evictions; the model refuses the keys that are ours.
        "annotations": {**metadata["annotations"], **overlay.annotations},
    }
    return {**body, "metadata": metadata, "spec": merged}


def _placement(spec: Body, overlay: PodOverlay) -> Body:
    fields: Body = {
        "nodeSelector": overlay.node_selector,
        "tolerations": [*spec["tolerations"], *_dumped(overlay.tolerations)],
        "affinity": _affinity(spec.get("affinity", {}), overlay),
        "topologySpreadConstraints": _dumped(overlay.topology_spread_constraints),
        "schedulerName": overlay.scheduler_name,
    }
    return {name: value for name, value in fields.items() if value}


def _affinity(ours: Body, overlay: PodOverlay) -> Body:
    """Both hold. Required terms of nodes are alternatives: what we require goes into each of the user's."""
    if overlay.affinity is None:
        return ours
    affinity = _dump(overlay.affinity)
    theirs, own = affinity.pop("nodeAffinity", {}), ours.get("nodeAffinity", {})
    terms: list[Body] = own.get(REQUIRED, {}).get("nodeSelectorTerms", [])
    expressions = [expression for term in terms for expression in term["matchExpressions"]]
    if REQUIRED in theirs:
        alternatives = theirs[REQUIRED]["nodeSelectorTerms"]
        terms = [{"matchExpressions": [*term["matchExpressions"], *expressions]} for term in alternatives]
    wishes = [*own.get(PREFERRED, ()), *theirs.get(PREFERRED, ())]
    nodes = {
        **({REQUIRED: {"nodeSelectorTerms": terms}} if terms else {}),
        **({PREFERRED: wishes} if wishes else {}),
    }
    return {**affinity, **({"nodeAffinity": nodes} if nodes else {})}


def _init_container(container: InitContainer) -> Body:
    body = _dump(container)
    mounts = [*body.get("volumeMounts", ()), SCRATCH_MOUNT]
    return {**body, "securityContext": CONFINED, "volumeMounts": mounts}


def _dumped(models: Sequence[ApiModel]) -> list[Body]:
    return [_dump(model) for model in models]


def _dump(model: ApiModel) -> Body:
    """As the pod has it: what is not said is left to Kubernetes, whose defaults are the same."""
    body: Body = model.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return body
