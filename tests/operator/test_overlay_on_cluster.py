"""Overlays at a real API server: its Pod Security admission, and the operator's words for pods that it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from everloop_operator.api import names
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.core import children
from everloop_operator.core.refusals import FORBIDDEN_SECONDS
from tests.operator.builders import SPEC, session
from tests.operator.full import FULL, GOOD, OVERLAY
from tests.operator.overlays import overlays
from tests.operator.world import SESSIONS, Api, World, eventually

NAMESPACE = "restricted"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All"
ENFORCED = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/enforce-version": "latest"}
MISSING = {"priorityClassName": "no-such-class"}
FOREIGN_CLASS = "no PriorityClass with name no-such-class was found"


@pytest.fixture(scope="module")
def namespace(api: Api) -> Api:
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": ENFORCED}})
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nv"}
    api.create("/apis/node.k8s.io/v1/runtimeclasses", runtime)
    return api


def built(spec: dict[str, Any]) -> dict[str, Any]:
    pod = children.pod(session(), TrainingSessionSpec.model_validate(spec), 1, image="trainer:1", avoid=(), shun=())
    pod["metadata"]["namespace"] = NAMESPACE
    return copy.deepcopy(pod)


def test_a_pod_with_everything_in_it_is_accepted(namespace: Api) -> None:
    """The pods of the fullest objects are good, and meet the restricted standard as Kubernetes itself checks it."""
    for good in GOOD:
        namespace.create(PODS, built(good["spec"]))
    worse = built(FULL["spec"])
    worse["spec"]["initContainers"][0]["securityContext"] = {}
    answer = namespace.request("POST", PODS, worse)
    assert "violates PodSecurity" in answer.text


def test_random_overlays_meet_the_standard(namespace: Api) -> None:
    """Whatever admission lets through as an overlay: the pod may be refused for its names, never for its rights."""
    path = f"{SESSIONS}/namespaces/{NAMESPACE}/{names.TRAINING_SESSION_PLURAL}?dryRun=All"
    admitted = accepted = 0

    @seed(20261130)
    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(overlays(intruders=False))
    def sample(overlay: dict[str, Any]) -> None:
        nonlocal admitted, accepted
        answer = namespace.request("POST", path, {**FULL, "spec": {**SPEC, "pod": overlay}})
        if answer.status_code >= 300:
            return
        admitted += 1
        answer = namespace.request("POST", PODS, built(answer.json()["spec"]))
        assert "PodSecurity" not in answer.text
        accepted += answer.status_code < 300

    sample()
    print(f"{admitted} overlays admitted, {accepted} of their pods accepted")
    assert accepted


def test_a_refused_overlay_is_told_in_the_api_servers_words(world: World) -> None:
    """What neither schema nor rules know is found when the pod is made: Stalled, and well again when it is mended."""
    world.claims()
    world.create_session(pod=MISSING)
    eventually("why it waits", lambda: FOREIGN_CLASS in world.condition(names.CONDITION_READY).get("message", ""))
    assert world.status()["phase"] == names.PHASE_PENDING
    refused = eventually("the refusal", lambda: _refused(world), FORBIDDEN_SECONDS + 20)
    assert FOREIGN_CLASS in refused["message"]
    status = world.wait_phase(names.PHASE_FAILED)
    assert status["attempt"] == 0
    world.api.merge(f"{world.sessions_path}/tuned", {"spec": {"pod": {"priorityClassName": ""}}})
    world.run_pod("tuned-a1-0", world.node("a"))
    world.wait_phase(names.PHASE_RUNNING)
    assert world.condition(names.CONDITION_STALLED)["status"] == "False"


def test_a_refused_overlay_leaves_the_running_pod_alone(world: World) -> None:
    """The pod that serves stays, and stays the one that the gateway is told of, while its successor is refused."""
    world.claims()
    world.create_session(pod={"labels": OVERLAY["labels"]})
    world.run_pod("tuned-a1-0", world.node("a"))
    world.wait_phase(names.PHASE_RUNNING)
    assert world.wait_pod("tuned-a1-0")["metadata"]["labels"]["team"] == "poems"
    world.api.merge(f"{world.sessions_path}/tuned", {"spec": {"pod": MISSING}})
    eventually("the refusal", lambda: FOREIGN_CLASS in str(world.status().get("conditions")), FORBIDDEN_SECONDS + 20)
    assert not world.deleting("tuned-a1-0")
    assert (world.status()["attempt"], world.status()["pod"]["name"]) == (1, "tuned-a1-0")
    world.api.merge(f"{world.sessions_path}/tuned", {"spec": {"pod": {"priorityClassName": ""}}})
    world.wait_phase(names.PHASE_RUNNING)
    assert world.status()["attempt"] == 1


def _refused(world: World) -> dict[str, Any] | None:
    stalled = world.condition(names.CONDITION_STALLED)
    return stalled if stalled.get("reason") == names.REASON_POD_INVALID else None
