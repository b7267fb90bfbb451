"""What a user asks for in `spec.pod` is in the pod, and nothing of it takes Everloop's place or lifts a restriction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from pydantic import ValidationError

from everloop_operator.api import names, pod_overlay, pod_volumes
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.core import children
from everloop_operator.core.projections import pod_of
from tests.operator.builders import session, spec
from tests.operator.full import ENVIRONMENT, GOOD, OVERLAY
from tests.operator.overlays import overlays
from tests.operator.restricted import violations

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
HASH_WITHOUT_OVERLAY = "5d1541b665bb25b9"
"""Template hash of the plain spec before there were overlays: a new release must not replace running pods."""


def built(overlay: dict[str, Any] | None = None, avoid: tuple[str, ...] = (), shun: tuple[str, ...] = ()) -> Any:
    body = children.pod(session(), spec(pod=overlay or {}), 3, image="trainer:1", avoid=avoid, shun=shun)
    return copy.deepcopy(body)


def other_than(*hostnames: str) -> dict[str, Any]:
    return {"key": names.NODE_HOSTNAME_LABEL, "operator": "NotIn", "values": list(hostnames)}


def test_an_absent_overlay_changes_no_hash() -> None:
    """Nor does one that spells the defaults out, as the API server does."""
    filled = {
        "serviceAccountName": "",
        "priorityClassName": "",
        "runtimeClassName": "",
        "schedulerName": "",
        "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
        "terminationGracePeriodSeconds": 120,
        "disruptionBudget": False,
    }
    assert children.template_hash(spec()) == HASH_WITHOUT_OVERLAY
    assert children.template_hash(spec(pod=filled)) == HASH_WITHOUT_OVERLAY


@pytest.mark.parametrize("field", sorted(OVERLAY))
def test_every_field_of_the_overlay_asks_for_another_pod(field: str) -> None:
    """A change of any field is a new attempt."""
    changed = {field: OVERLAY[field] or "other"}
    assert children.template_hash(spec(pod=changed)) != HASH_WITHOUT_OVERLAY


def test_what_is_asked_for_is_in_the_pod() -> None:
    """Word for word, after what Everloop has there itself."""
    plain, pod = built()["spec"], built(OVERLAY)["spec"]
    for field in ("serviceAccountName", "imagePullSecrets", "nodeSelector", "runtimeClassName", "schedulerName"):
        assert pod[field] == OVERLAY[field], field
    assert pod["topologySpreadConstraints"] == OVERLAY["topologySpreadConstraints"]
    assert pod["terminationGracePeriodSeconds"] == 300
    identity = ("runAsUser", "runAsGroup", "fsGroup")
    assert [pod["securityContext"][field] for field in identity] == [2000, 2000, 3000]
    assert pod["volumes"] == [*plain["volumes"], *OVERLAY["volumes"]]
    [before], [trainer] = plain["containers"], pod["containers"]
    assert trainer["volumeMounts"] == [*before["volumeMounts"], *OVERLAY["volumeMounts"]]
    assert trainer["env"][len(before["env"]) :] == ENVIRONMENT
    assert trainer["env"][1] == {"name": "EVERLOOP_GRACE_SECONDS", "value": "300"}
    assert trainer["env"][2 : len(before["env"])] == before["env"][2:]
    equal, exists = OVERLAY["tolerations"]
    equal = {key: value for key, value in equal.items() if key != "operator"}  # Equal is what Kubernetes takes it for
    assert pod["tolerations"] == [*plain["tolerations"], equal, exists]
    for asked, init in zip(OVERLAY["initContainers"], pod["initContainers"], strict=True):
        mounts = [*asked.get("volumeMounts", ()), {"name": "tmp", "mountPath": "/tmp"}]
        assert {**asked, "volumeMounts": mounts}.items() <= init.items()


def test_own_labels_and_annotations_join_ours() -> None:
    """Eviction is the one thing of ours on which the user may decide otherwise."""
    allowed = {"karpenter.sh/do-not-disrupt": "false"}
    metadata = built({"labels": {"team": "poems"}, "annotations": allowed})["metadata"]
    assert metadata["labels"] == {**built()["metadata"]["labels"], "team": "poems"}
    assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "false"
    assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


def test_avoided_nodes_are_left_out_of_every_alternative() -> None:
    """Terms are alternatives: a node that failed must be excluded from each, and what the user requires stays."""
    affinity = built(OVERLAY, avoid=("node-a",), shun=("node-b",))["spec"]["affinity"]
    asked = OVERLAY["affinity"]
    terms = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in terms] == [
        [*term["matchExpressions"], other_than("node-a")]
        for term in asked["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    ]
    ours, theirs = affinity["nodeAffinity"][PREFERRED]
    assert ours["preference"]["matchExpressions"] == [other_than("node-b")]
    assert [theirs] == asked["nodeAffinity"][PREFERRED]
    assert (affinity["podAffinity"], affinity["podAntiAffinity"]) == (asked["podAffinity"], asked["podAntiAffinity"])


@pytest.mark.parametrize("theirs", [[], [{"key": "zone", "operator": "Exists"}]], ids=["alone", "with the user's"])
def test_a_name_that_is_no_value_of_a_label_is_avoided_by_name(theirs: list[dict[str, Any]]) -> None:
    """The API server would refuse the pod; all others are named by their label, as autoscalers need it."""
    long = "n" * 64
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [long]}]
    asked = {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": theirs}]}}}}
    pod = built(asked if theirs else {}, avoid=(long, "node-a"), shun=(long,))
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    [term] = affinity[REQUIRED]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [*theirs, other_than("node-a")], "matchFields": fields}
    [wish] = affinity[PREFERRED]
    assert wish["preference"] == {"matchFields": fields}
    seen = {"uid": "u", "creationTimestamp": "2026-05-01T12:00:00Z", **pod["metadata"]}
    read = pod_of({**pod, "metadata": seen})
    assert read
    assert read.avoided_nodes == {long, "node-a"}


def test_avoidance_holds_without_terms_of_the_user() -> None:
    """An overlay with another affinity, or with wishes only, leaves ours as it is."""
    ours = built(avoid=("node-a",))["spec"]["affinity"]["nodeAffinity"]
    others: tuple[dict[str, Any], ...] = ({"podAffinity": OVERLAY["affinity"]["podAffinity"]}, {"nodeAffinity": {}})
    for affinity in others:
        assert built({"affinity": affinity}, avoid=("node-a",))["spec"]["affinity"]["nodeAffinity"] == ours


def test_nodes_that_the_user_excludes_are_not_those_that_failed() -> None:
    """Only ours are read back: a pod that finds no node must not be made anew for what the user has excluded."""
    for avoid in ((), ("node-a", "node-c")):
        body = built(OVERLAY, avoid=avoid)
        body["metadata"] |= {"uid": "u", "creationTimestamp": "2026-05-01T11:00:00Z"}
        pod = pod_of(body)
        assert pod is not None
        assert pod.avoided_nodes == set(avoid)


@pytest.mark.parametrize("good", GOOD)
def test_every_name_of_ours_is_reserved(good: dict[str, Any]) -> None:
    """Volumes, mounts, variables and containers of the pod have names that the overlay can't take."""
    plain = {field: value for field, value in good["spec"].items() if field != "pod"}
    everything = TrainingSessionSpec.model_validate(plain)
    pod = children.pod(session(), everything, 3, image="trainer:1", avoid=(), shun=())["spec"]
    [trainer] = pod["containers"]
    for volume in pod["volumes"]:
        reserved = volume["name"] in pod_volumes.RESERVED_VOLUMES
        assert reserved or volume["name"].startswith(pod_volumes.RESERVED_PREFIX), volume["name"]
    for mount in trainer["volumeMounts"]:
        path = mount["mountPath"]
        assert any(path == top or path.startswith(f"{top}/") for top in pod_volumes.RESERVED_MOUNTS), path
    for variable in trainer["env"]:
        reserved = variable["name"] in pod_overlay.RESERVED_ENVIRONMENT
        assert reserved or variable["name"].startswith(pod_overlay.RESERVED_ENVIRONMENT_PREFIXES), variable["name"]
    for container in pod.get("initContainers", ()):
        assert container["name"].startswith(pod_volumes.RESERVED_PREFIX)
    assert trainer["name"] == names.TRAINER_CONTAINER


def test_confinement_is_kept_by_the_model_too() -> None:
    """An annotation that an older schema let through is an invalid spec, not a pod without confinement."""
    for key in (*pod_overlay.RESERVED_KEYS, *pod_overlay.UNSAFE_ANNOTATIONS):
        with pytest.raises(ValidationError, match="reserved"):
            spec(pod={"annotations": {f"{key}trainer": "unconfined"}})


def test_restatement_finds_what_breaks_the_standard() -> None:
    """The oracle itself: a pod with each violation, one at a time, is found out."""
    assert violations(built()) == []
    for where, field, value in (
        ("spec", "hostNetwork", True),
        ("spec", "volumes", [{"name": "x", "hostPath": {"path": "/"}}]),
        ("spec", "securityContext", {}),
        ("container", "securityContext", {}),
        ("container", "ports", [{"containerPort": 1, "hostPort": 1}]),
        ("metadata", "annotations", {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}),
    ):
        pod = built()
        {"spec": pod["spec"], "metadata": pod["metadata"], "container": pod["spec"]["containers"][0]}[where][field] = (
            value
        )
        assert violations(pod), field


@seed(20261130)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(overlays(intruders=True))
def test_no_overlay_escapes_the_restricted_standard(overlay: dict[str, Any]) -> None:
    """Whatever the schema lets through, and whatever else comes with it: our frame stands, and no right is added."""
    plain = built()
    parsed = TrainingSessionSpec.model_validate({**spec().model_dump(by_alias=True), "pod": overlay})
    pod = children.pod(session(), parsed, 3, image="trainer:1", avoid=(), shun=())
    assert violations(pod) == []
    assert pod["metadata"]["labels"].items() >= plain["metadata"]["labels"].items()
    for field in ("restartPolicy", "automountServiceAccountToken", "enableServiceLinks"):
        assert pod["spec"][field] == plain["spec"][field]
    assert "nodeName" not in pod["spec"]
    [trainer], [before] = pod["spec"]["containers"], plain["spec"]["containers"]
    assert {**trainer, "env": [], "volumeMounts": []} == {**before, "env": [], "volumeMounts": []}
    for field, told in (("env", 2), ("volumeMounts", 1)):  # what tells the trainer of its spec comes first
        assert trainer[field][told : len(before[field])] == before[field][told:]
