"""Adds to a pod what its user asks for in `spec.pod` or `spec.runner.pod`. What is ours there stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everloop_operator.api.pod_overlay import InitContainer, PodAdditions, PodOverlay
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


def add(body: Body, additions: PodAdditions) -> Body:
    """The pod `body` with what any pod may have. Lists are joined, and no label of ours changes."""
    metadata, spec = body["metadata"], body["spec"]
    main, *others = spec["containers"]
    main = {**main, "volumeMounts": [*main["volumeMounts"], *_dumped(additions.volume_mounts)]}
    identity = additions.security_context
    merged = {
        **spec,
        "tolerations": [*spec["tolerations"], *_dumped(additions.tolerations)],
        "securityContext": {
            **spec["securityContext"],
            "runAsUser": identity.run_as_user,
            "runAsGroup": identity.run_as_user,
            "fsGroup": identity.fs_group,
        },
        "containers": [main, *others],
        "volumes": [*spec["volumes"], *_dumped(additions.volumes)],
    }
    optional = {
        "nodeSelector": additions.node_selector,
        "schedulerName": additions.scheduler_name,
        "serviceAccountName": additions.service_account_name,
        "imagePullSecrets": _dumped(additions.image_pull_secrets),
        "runtimeClassName": additions.runtime_class_name,
        "priorityClassName": additions.priority_class_name,
    }
    merged |= {field: value for field, value in optional.items() if value}
    metadata = {
        **metadata,
        "labels": {**additions.labels, **metadata["labels"]},
        # The user may think otherwise about evictions; the model refuses the keys that are ours.
        "annotations": {**metadata["annotations"], **additions.annotations},
    }
    return {**body, "metadata": metadata, "spec": merged}


def lay(body: Body, overlay: PodOverlay) -> Body:
    """The session pod `body` with its overlay."""
    added = add(body, overlay)
    spec = added["spec"]
    trainer, *others = spec["containers"]
    merged = {
        **spec,
        "terminationGracePeriodSeconds": overlay.termination_grace_period_seconds,
        "containers": [{**trainer, "env": [*trainer["env"], *_dumped(overlay.env)]}, *others],
    }
    own = [{**each, "env": [*each["env"], *_dumped(overlay.env)]} for each in spec.get("initContainers", ())]
    optional: Body = {
        "affinity": _affinity(spec.get("affinity", {}), overlay),
        "topologySpreadConstraints": _dumped(overlay.topology_spread_constraints),
        "initContainers": [*map(_init_container, overlay.init_containers), *own],
    }
    merged |= {field: value for field, value in optional.items() if value}
    return {**added, "spec": merged}


def _affinity(ours: Body, overlay: PodOverlay) -> Body:
    """Both hold. Required terms of nodes are alternatives: what we require goes into each of the user's."""
    if overlay.affinity is None:
        return ours
    affinity = _dump(overlay.affinity)
    theirs, own = affinity.pop("nodeAffinity", {}), ours.get("nodeAffinity", {})
    [required] = own.get(REQUIRED, {}).get("nodeSelectorTerms", [{}])
    alternatives = theirs.get(REQUIRED, {}).get("nodeSelectorTerms", [{}])
    terms = [term for term in (_both(alternative, required) for alternative in alternatives) if term]
    wishes = [*own.get(PREFERRED, ()), *theirs.get(PREFERRED, ())]
    nodes = {
        **({REQUIRED: {"nodeSelectorTerms": terms}} if terms else {}),
        **({PREFERRED: wishes} if wishes else {}),
    }
    return {**affinity, **({"nodeAffinity": nodes} if nodes else {})}


def _both(alternative: Body, required: Body) -> Body:
    expressions = [*alternative.get("matchExpressions", ()), *required.get("matchExpressions", ())]
    return {**required, **({"matchExpressions": expressions} if expressions else {})}


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
