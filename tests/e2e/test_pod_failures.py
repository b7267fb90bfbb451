"""What ends pods, seen for real: scheduler, eviction API and kubelets end the session's pod, and the loop goes on."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everloop_operator.api import names
from tests.e2e.waiting import eventually
from tests.e2e.world import NAMESPACE, Everloop
from tests.soak.leg import LINGER_SECONDS, Run, compare, start, wait_told

pytestmark = pytest.mark.cluster

Body = dict[str, Any]
RECOVERY_SECONDS = 240
POOL = "example.com/pool"
MISSING_IMAGE = "registry.example.com/missing:1"
PULL_ERROR = "manifest unknown"
URGENT = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}, "value": 1000}


def running(everloop: Everloop, attempt: int = 0) -> Body:
    """The status once an attempt of this number or a later one serves."""

    def seen() -> Body | None:
        status = everloop.session.status()
        return status if status["phase"] == names.PHASE_RUNNING and status["attempt"] >= attempt else None

    return eventually(seen, f"attempt {attempt} Running", RECOVERY_SECONDS)


def change(everloop: Everloop, spec: Body) -> None:
    """Change the session as its user does."""
    body = json.dumps({"spec": spec})
    everloop.session.tools.kube("-n", NAMESPACE, "patch", "tsess", everloop.session.name, "--type=merge", "-p", body)


def recovered(everloop: Everloop, before: Body, reason: str) -> str:
    """Until the session has recovered from the loss of the attempt of `before` for this reason; the story of the loss.

    It may have lost a further pod meanwhile, on a machine that is slow.
    """

    def seen() -> Body | None:
        found = [entry for entry in everloop.session.status()["recoveries"] if entry["attempt"] > before["attempt"]]
        return found[0] if found and "seconds" in found[0] else None

    entry = eventually(seen, f"a recovery for {reason}", RECOVERY_SECONDS)
    print(f"{reason}: {entry}")
    assert (entry["reason"], entry["node"], entry["lostOperations"]) == (reason, before["pod"]["node"], 0)
    pod = before["pod"]["name"]
    events = everloop.session.tools.get("-n", NAMESPACE, "events")["items"]
    return " ".join(event["message"] for event in events if f"pod {pod} is" in event["message"])


def restart_kubelet(everloop: Everloop, node: str) -> None:
    """Kill a kubelet; the supervisor of the cluster starts the next one, over the containers that run."""
    process = everloop.session.cluster.component(f"kubelet-{node}")
    assert process
    process.kill()


def preempted(everloop: Everloop) -> None:
    """A pod of a higher class wants every GPU of the node: the scheduler makes room."""
    tools, before = everloop.session.tools, running(everloop)
    container = {"name": "own", "image": "busybox:1", "command": ["sleep", "3600"]}
    spec = {
        "priorityClassName": "urgent",
        "nodeSelector": {names.NODE_HOSTNAME_LABEL: before["pod"]["node"]},
        "terminationGracePeriodSeconds": 0,
        "containers": [{**container, "resources": {"limits": {"nvidia.com/gpu": "4"}}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent", "namespace": "default"}, "spec": spec}
    tools.kube("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": [URGENT, pod]}))
    try:
        assert "PreemptionByScheduler" in recovered(everloop, before, names.RECOVERY_PREEMPTED)
        assert everloop.session.status()["pod"]["node"] != before["pod"]["node"]
    finally:
        tools.kube("-n", "default", "delete", "pod", "urgent")
        tools.kube("delete", "priorityclass", "urgent")


def drained(everloop: Everloop) -> None:
    """Somebody drains: the eviction API lets the pod go."""
    before = running(everloop)
    name = before["pod"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    everloop.session.tools.kube("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    assert "EvictionByEvictionAPI" in recovered(everloop, before, names.RECOVERY_DRAINED)


def rejected(everloop: Everloop) -> None:
    """A kubelet that starts anew does not admit the pod again: its node has lost the label that the pod asks for."""
    tools = everloop.session.tools
    tools.kube("label", "nodes", "--all", f"{POOL}=own")
    with asking(everloop, {"pod": {"nodeSelector": {POOL: "own"}}}, {"pod": {"nodeSelector": None}}) as before:
        node = before["pod"]["node"]
        tools.kube("label", "node", node, f"{POOL}-")
        restart_kubelet(everloop, node)
        assert "NodeAffinity" in recovered(everloop, before, names.RECOVERY_POD_REJECTED)
        assert everloop.session.status()["pod"]["node"] != node
    tools.kube("label", "nodes", "--all", f"{POOL}-")


def evicted(everloop: Everloop) -> None:
    """A kubelet finds its node short of memory, and evicts what runs there."""
    cluster = everloop.session.cluster
    with asking(everloop, {}, {}) as before:
        node = before["pod"]["node"]
        with short_of_memory(cluster.layout.node(node) / "kubelet.json"):
            restart_kubelet(everloop, node)
            assert "Evicted" in recovered(everloop, before, names.RECOVERY_EVICTED)
        restart_kubelet(everloop, node)
        cluster.wait_node(node, ready=True)


@contextmanager
def asking(everloop: Everloop, spec: Body, restored: Body) -> Iterator[Body]:
    """The status of an attempt whose spec has these fields and no GPU: a kubelet that starts anew knows of none.

    It would reject a pod with one for that, until its device plugin has come back.
    """
    first = running(everloop)
    change(everloop, {**spec, "workers": {"resources": {"limits": {"nvidia.com/gpu": None}}}})
    try:
        yield running(everloop, first["attempt"] + 1)
    finally:
        last = running(everloop)
        change(everloop, {**restored, "workers": {"resources": {"limits": {"nvidia.com/gpu": 1}}}})
        running(everloop, last["attempt"] + 1)


@contextmanager
def short_of_memory(configuration: Path) -> Iterator[None]:
    """A kubelet that starts with this counts any amount of memory as too little."""
    text = configuration.read_text()
    limits = {
        "evictionSoft": {"memory.available": "1Pi"},  # a hard limit would be set aside on the node, and be too large
        "evictionSoftGracePeriod": {"memory.available": "1s"},
        "evictionPressureTransitionPeriod": "1s",
    }
    configuration.write_text(json.dumps({**json.loads(text), **limits}))
    try:
        yield
    finally:
        configuration.write_text(text)


def imageless(everloop: Everloop) -> None:
    """An image that no registry has keeps the next pod from starting, until the spec names another one."""
    before, images = running(everloop), everloop.session.cluster.layout.images
    known = json.loads(images.read_text())
    aside = images.with_name("images.json.new")
    aside.write_text(json.dumps([{"match": MISSING_IMAGE, "pull_error": PULL_ERROR}, *known]))
    aside.replace(images)
    change(everloop, {"image": MISSING_IMAGE})
    try:
        told = eventually(lambda: _pods_condition(everloop, names.REASON_IMAGE_UNAVAILABLE), "no image", 120)
        assert PULL_ERROR in told
        assert everloop.session.status()["attempt"] == before["attempt"] + 1
    finally:
        change(everloop, {"image": None})
    assert running(everloop, before["attempt"] + 2)["attempt"] == before["attempt"] + 2, "no attempt but those of specs"


def _pods_condition(everloop: Everloop, reason: str) -> str | None:
    conditions = everloop.session.status()["conditions"]
    found = next(item for item in conditions if item["type"] == names.CONDITION_PODS_READY)
    return str(found["message"]) if found["reason"] == reason else None


CASES: tuple[Callable[[Everloop], None], ...] = (preempted, drained, rejected, evicted, imageless)


def test_a_loop_outlives_what_ends_its_pods(everloop: Everloop, seed: int) -> None:
    """Each failure, or one at random: its class in the status, the cause in an event, nothing lost."""
    cases = CASES if os.environ.get("EVERLOOP_TEST_WHOLE") else (random.Random(seed).choice(CASES),)
    stop = everloop.directory / "stop-failures"
    run = start(everloop, "failures", seed, "--until", str(stop), "--linger", str(LINGER_SECONDS))
    try:
        wait_told(run, 0)
        for case in cases:
            struck(everloop, run, case)
        stop.touch()
        path = run.finish()
    finally:
        run.loop.stop()
    steps, fault = compare(everloop, run, path, seed)
    assert fault == ""
    assert steps > 0


def struck(everloop: Everloop, run: Run, case: Callable[[Everloop], None]) -> None:
    """Let a failure happen, and wait until the loop was told more."""
    known = len(run.told())
    case(everloop)
    wait_told(run, known)
