"""Life cycle against a real API server: the tests play people, scheduler, kubelets and trainers."""

from __future__ import annotations

import signal

import httpx
import pytest

from everloop_operator.api import names, tokens
from everloop_operator.api.training_session import MAX_NAME_LENGTH
from tests.operator.world import Operator, World, container, eventually, stamp

pytestmark = pytest.mark.slow


def merge(world: World, **spec: object) -> None:
    world.api.merge(f"{world.sessions_path}/tuned", {"spec": spec})


def passes(world: World, operator: Operator) -> float:
    """How many passes over sessions the operator has finished since its start."""
    bearer = {"Authorization": f"Bearer {tokens.metrics_token(world.master_key())}"}
    url = f"http://{operator.ip}:{names.METRICS_PORT}/metrics"
    told = httpx.get(url, headers=bearer, trust_env=False).raise_for_status().text
    counts = f'everloop_reconcile_seconds_count{{kind="{names.TRAINING_SESSION_KIND}"'
    return sum(float(line.rpartition(" ")[2]) for line in told.splitlines() if line.startswith(counts))


def looked_at_again(world: World, operator: Operator, change: str) -> None:
    """The pod changes in a way that is no reason to do anything, and a pass follows."""
    before = passes(world, operator)
    world.set_pod("tuned-a1-0", message=change)
    eventually("a pass", lambda: passes(world, operator) > before)


def test_suspended_resumed_and_stopped(world: World) -> None:
    """The pod goes behind its snapshots and comes back as the next attempt; stopped, it goes with its token."""
    world.claims()
    node = world.node("a")
    world.create_session()
    trainer = world.run_pod("tuned-a1-0", node)
    world.wait_phase("Running")
    merge(world, suspend=True)
    eventually("deletion", lambda: world.deleting("tuned-a1-0"))
    assert [name.partition("-")[0] for name in trainer.snapshots] == ["suspend"]
    world.wait_phase("Stopping")
    world.remove_pod("tuned-a1-0")
    status = world.wait_phase("Suspended")
    assert (status.get("pod"), world.condition("Ready")["status"], world.pods()) == (None, "True", [])
    merge(world, suspend=False)
    world.run_pod("tuned-a2-0", node)
    status = world.wait_phase("Running")
    assert (status["attempt"], status["recoveryCount"], status.get("rest")) == (2, 0, None)
    merge(world, stop=True)
    eventually("deletion", lambda: world.deleting("tuned-a2-0"))
    world.remove_pod("tuned-a2-0")
    world.wait_phase("Stopped")
    secrets = world.path("secrets")
    eventually("removal of the tokens", lambda: not [s for s in world.api.items(secrets) if "token" in str(s)])
    answer = world.api.request(
        "PATCH", f"{world.sessions_path}/tuned", {"spec": {"stop": False}}, "application/merge-patch+json"
    )
    assert answer.status_code == 422
    assert "spec.stop cannot be taken back" in answer.text
    told = {names.EVENT_SUSPENDED, names.EVENT_RESUMED, names.EVENT_STOPPED}
    eventually("events", lambda: told <= {event["reason"] for event in world.events()})


def test_deletion_waits_for_copies_and_hold_for_nobody(world: World) -> None:
    """On hold nothing is made; the finalizer keeps object and pod while copies are pending, and no longer."""
    world.claims()
    node, path = world.node("a"), f"{world.sessions_path}/tuned"
    world.create_session(deletion={"waitForCopies": True})
    trainer = world.run_pod("tuned-a1-0", node, copies={"pending": 1})
    world.wait_phase("Running")
    assert world.session()["metadata"]["finalizers"] == [names.FINALIZER_COPIES]
    world.api.merge(path, {"metadata": {"annotations": {names.ANNOTATION_PAUSED: "true"}}})
    eventually("the hold", lambda: world.condition("Reconciling")["reason"] == "Paused")
    merge(world, image="other:1")
    world.api.merge(path, {"metadata": {"annotations": {names.ANNOTATION_PAUSED: None}}})
    eventually("the next attempt", lambda: world.pod("tuned-a2-0"))
    assert trainer.snapshots != []
    trainer = world.run_pod("tuned-a2-0", node, copies={"pending": 1})
    world.wait_phase("Running")
    world.api.delete(path)
    eventually("the wait", lambda: world.condition("Reconciling")["reason"] == "DeletionWaits")
    assert not world.deleting("tuned-a2-0")
    trainer.report = {**trainer.report, "copies": {"pending": 0}}
    eventually("the end", lambda: world.api.get(path) is None)


def test_a_failed_session_of_the_gateway_goes_after_its_time(world: World) -> None:
    """With ttlSecondsAfterFinished 0 at once: the object too, because the next call makes it again."""
    world.claims()
    world.create_session()
    world.run_pod("tuned-a1-0", world.node("a"), state="Starting")
    ended = {"exitCode": 65, "reason": "Error", "message": "StorageMismatch: other/model", "finishedAt": stamp()}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    world.set_pod("tuned-a1-0", **container(waiting, lastState={"terminated": ended}, restartCount=1))
    world.wait_phase("Failed")
    path = f"{world.sessions_path}/tuned"
    world.api.merge(path, {"metadata": {"labels": {names.LABEL_CREATED_BY: names.CREATED_BY_GATEWAY}}})
    merge(world, ttlSecondsAfterFinished=0)
    eventually("the end", lambda: world.api.get(path) is None)


def test_deletion_while_the_operator_is_away(world: World, operator: Operator) -> None:
    """It ends soon after the operator is back; a finalizer of somebody else stays, and is fought by nobody."""
    world.claims()
    path, other = f"{world.sessions_path}/tuned", "example.com/other"
    world.create_session(deletion={"waitForCopies": True})
    world.run_pod("tuned-a1-0", world.node("a"), copies={"pending": 0})
    world.wait_phase("Running")
    world.api.merge(path, {"metadata": {"finalizers": [names.FINALIZER_COPIES, other]}})
    operator.stop(signal.SIGKILL)
    world.api.delete(path)
    operator.start()
    eventually("the end of our finalizer", lambda: world.session()["metadata"]["finalizers"] == [other])
    version = world.session()["metadata"]["resourceVersion"]
    for change in ("first", "second"):  # the pass that the first waits for may be that over the operator's own write
        looked_at_again(world, operator, change)
    assert world.session()["metadata"]["resourceVersion"] == version
    world.api.merge(path, {"metadata": {"finalizers": None}})
    eventually("the end", lambda: world.api.get(path) is None)


def test_deletion_before_anything_could_be_made(world: World) -> None:
    """Neither a pod that is refused nor a finalizer of ours holds it up."""
    none, quotas = {"pods": "0"}, world.path("resourcequotas")
    world.api.create(quotas, {"metadata": {"name": "none"}, "spec": {"hard": none}})
    world.api.merge(f"{quotas}/none/status", {"status": {"hard": none, "used": none}})  # as its controller would
    path = f"{world.sessions_path}/tuned"
    world.create_session(deletion={"waitForCopies": True})
    eventually("the refusal", lambda: "exceeded quota" in str(world.status()))
    assert world.session()["metadata"]["finalizers"] == [names.FINALIZER_COPIES]
    world.api.delete(path)
    eventually("the end", lambda: world.api.get(path) is None)


def test_sessions_with_the_longest_and_oddest_names_run_beside_another(world: World) -> None:
    """All that admission lets through: each has its own pod and token, and an ordinary one is not delayed."""
    world.claims()
    longest = [f"{'x' * (MAX_NAME_LENGTH - 1)}{end}" for end in "12"]
    sessions = [*longest, "1", "1-a1-0", "ordinary"]
    for name in sessions:
        world.create_session(name)
    node = world.node("a")
    for name in sessions:
        world.run_pod(f"{name}-a1-0", node)
        world.wait_phase("Running", name)
        assert world.api.get(world.path("secrets", f"{name}-a1-token"))
    owners = {pod["metadata"]["name"]: pod["metadata"]["ownerReferences"][0]["name"] for pod in world.pods()}
    assert owners == {f"{name}-a1-0": name for name in sessions}
