"""The operator against a real API server: the tests play people, scheduler, kubelets and trainers."""

from __future__ import annotations

import base64
import signal
import time

import pytest

from everloop_operator.api import names
from tests.operator.world import RELEASE, Operator, World, container, eventually, stamp

pytestmark = pytest.mark.slow


def test_session_runs_and_moves_to_another_node_when_its_node_is_lost(world: World) -> None:
    """From creation over Serving to the loss of the node: one new pod elsewhere, and the story in status and events."""
    world.claims()
    first, second = world.node("a"), world.node("b")
    world.create_session(workers={"resources": {"limits": {"cpu": "2", "nvidia.com/gpu": 1}}})
    pod = world.wait_pod("tuned-a1-0")
    assert pod["metadata"]["ownerReferences"][0]["name"] == "tuned"
    assert world.api.get(world.path("secrets", "tuned-a1-token"))
    world.run_pod("tuned-a1-0", first, models=[{"id": "m-1", "rank": 8, "step": 3}])
    status = world.wait_phase("Running")
    assert (status["attempt"], status["pod"]["node"], status["modelCount"]) == (1, first, 1)
    claim = world.api.get(world.path("persistentvolumeclaims", "training"))
    assert claim is not None
    assert status["storage"]["fenceMode"] == "SharedPosix"
    assert status["storage"]["claimUID"] == claim["metadata"]["uid"]
    assert status["storage"]["lineage"] == "11111111-2222-3333-4444-555555555555"

    world.set_ready(first, "Unknown")
    pod = world.wait_pod("tuned-a2-0")
    world.wait_phase("Recovering")
    expression = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert expression["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == [first]
    eventually("deletion of the old pod", lambda: world.deleting("tuned-a1-0"))
    world.run_pod(
        "tuned-a2-0",
        second,
        recoveries=[
            {
                "id": "a2-b1-e1",
                "reason": "PodReplaced",
                "resumedFrom": "m-1:6",
                "replayedOperations": 4,
                "lostOperations": 0,
                "seconds": "1.5",
                "time": "2026-01-01T00:00:00Z",
            }
        ],
    )
    status = world.wait_phase("Running")
    entry = status["recoveries"][-1]
    assert (entry["reason"], entry["node"], entry["attempt"]) == ("NodeLost", first, 2)
    assert (entry["replayedOperations"], entry["lostOperations"], entry["resumedFrom"]) == (4, 0, "m-1:6")
    assert float(entry["seconds"]) > 0
    assert (status["attempt"], status["pod"]["node"], status["recoveryCount"]) == (2, second, 1)
    assert status["budgets"]["infrastructure"]["used"] == 1
    told = {"PodCreated", "Serving", "NodeLost", "NewAttempt", "Recovered"}
    # Events are posted after the status that they tell of.
    eventually("events", lambda: told <= {event["reason"] for event in world.events()})


def test_node_whose_name_is_no_value_of_a_label_is_left_too(world: World) -> None:
    """The API server takes the pod that is to keep away from it."""
    world.claims()
    first = world.node("n" * 64)
    world.create_session()
    world.run_pod("tuned-a1-0", first)
    world.wait_phase("Running")
    world.set_ready(first, "Unknown")
    affinity = world.wait_pod("tuned-a2-0")["spec"]["affinity"]["nodeAffinity"]
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": [first]}]


def test_zombie_that_still_answers_is_replaced_and_later_removed(world: World) -> None:
    """The node's readiness decides, not the pod's answer; without proof of death the object stays for a while."""
    world.claims()
    first, second = world.node("a"), world.node("b")
    world.create_session(recovery={"forceDeleteAfterSeconds": 0})
    zombie = world.run_pod("tuned-a1-0", first)
    world.wait_phase("Running")
    world.set_ready(first, "Unknown")
    world.run_pod("tuned-a2-0", second)
    status = world.wait_phase("Running")
    assert status["pod"]["name"] == "tuned-a2-0"
    assert zombie.asked > 0
    eventually("removal of the old pod", lambda: world.pod("tuned-a1-0") is None, 45)
    eventually("removal of the old token", lambda: world.api.get(world.path("secrets", "tuned-a1-token")) is None)
    assert "PodForceDeleted" in [event["reason"] for event in world.events()]


def test_exclusive_claim_is_never_force_deleted_without_proof(world: World) -> None:
    """ReadWriteOnce: the object of the lost pod stands for the attached volume, and stays until its node is gone."""
    world.claims(mode="ReadWriteOnce")
    first, second = world.node("a"), world.node("b")
    world.create_session(recovery={"forceDeleteAfterSeconds": 0})
    world.run_pod("tuned-a1-0", first)
    world.wait_phase("Running")
    world.set_ready(first, "False")
    world.run_pod("tuned-a2-0", second)
    assert world.wait_phase("Running")["storage"]["fenceMode"] == "Exclusive"
    eventually("deletion of the old pod", lambda: world.deleting("tuned-a1-0"))
    world.api.delete(f"/api/v1/nodes/{first}")
    eventually("removal, by proof", lambda: world.pod("tuned-a1-0") is None)


def test_deleted_pod_is_replaced_at_once_without_using_the_budget(world: World) -> None:
    """`kubectl delete pod` moves the session within seconds; it may come back to the same node."""
    world.claims()
    node = world.node("a")
    world.create_session()
    world.run_pod("tuned-a1-0", node)
    world.wait_phase("Running")
    world.api.delete(world.path("pods", "tuned-a1-0"))
    pod = world.wait_pod("tuned-a2-0")
    assert "affinity" not in pod["spec"]
    world.run_pod("tuned-a2-0", node)
    status = world.wait_phase("Running")
    assert status["recoveries"][-1]["reason"] == "PodDeleted"
    assert status["budgets"]["infrastructure"]["used"] == 0


def test_flapping_node_costs_nothing(world: World) -> None:
    """A node that is not Ready for less than the limit causes no new attempt."""
    world.claims()
    node = world.node("a")
    world.create_session()
    world.run_pod("tuned-a1-0", node)
    world.wait_phase("Running")
    world.set_ready(node, "False")
    eventually("it is noticed", lambda: world.condition("NodesHealthy").get("status") == "False")
    world.set_ready(node, "True")
    eventually("it is over", lambda: world.condition("NodesHealthy").get("status") == "True")
    assert world.pod("tuned-a2-0") is None
    assert world.status()["attempt"] == 1


def test_engine_recoveries_are_taken_over_from_the_trainer(world: World) -> None:
    """What the trainer recovered in place shows in status and events, once."""
    world.claims()
    node = world.node("a")
    world.create_session()
    trainer = world.run_pod("tuned-a1-0", node)
    world.wait_phase("Running")
    entry = {
        "id": "a1-b1-e2",
        "reason": "EngineLost",
        "resumedFrom": "m-1:24",
        "replayedOperations": 7,
        "lostOperations": 0,
        "seconds": "1.8",
        "time": "2026-01-01T00:00:00Z",
    }
    trainer.report = {**trainer.report, "recoveries": [entry]}
    status = eventually("the entry", lambda: world.status() if world.status()["recoveries"] else None)
    assert status["recoveryCount"] == 1
    assert status["recoveries"][0] == {**entry, "attempt": 1, "node": node}
    events = eventually("its event", lambda: [e for e in world.events() if e["reason"] == "EngineRecovered"])
    assert len(events) == 1
    assert "replayed 7 operations, lost 0" in events[0]["message"]


def test_change_of_resources_starts_a_new_attempt(world: World) -> None:
    """Behind snapshots the pod is rebuilt from the changed spec; one that runs is told of changed checkpoints."""
    world.claims()
    node = world.node("a")
    world.create_session()
    trainer = world.run_pod("tuned-a1-0", node, checkpoints={"everySeconds": 1800, "keepLast": 2})
    world.wait_phase("Running")
    path = f"{world.sessions_path}/tuned"
    world.api.merge(path, {"spec": {"checkpoints": {"everySeconds": 60}}})
    eventually("it is told", lambda: trainer.settings == [{"checkpoints": {"everySeconds": 60, "keepLast": 2}}])
    generation = world.api.merge(path, {"spec": {"recovery": {"avoidSeconds": 60}}})["metadata"]["generation"]
    eventually("it is seen", lambda: world.status()["observedGeneration"] == generation)
    assert (world.status()["attempt"], len(trainer.settings)) == (1, 1)
    world.api.merge(path, {"spec": {"workers": {"resources": {"requests": {"cpu": "250m"}}}}})
    pod = world.wait_pod("tuned-a2-0")
    assert pod["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "250m"}
    assert trainer.snapshots == [f"spec-{pod['metadata']['annotations'][names.ANNOTATION_TEMPLATE_HASH]}"]
    assert world.wait_phase("Recovering")["recoveries"][-1]["reason"] == "SpecChanged"


def test_missing_claim_and_scheduler_words_are_shown(world: World) -> None:
    """Conditions name the claim that is missing, and quote the scheduler."""
    world.claim("models", mode="ReadOnlyMany")
    world.create_session()
    world.unschedulable("tuned-a1-0", '0/3 nodes are available: persistentvolumeclaim "training" not found.')
    eventually("scheduler", lambda: "0/3 nodes" in world.condition("PodsReady").get("message", ""))
    volumes = world.condition("VolumesReady")
    assert (volumes["status"], volumes["reason"]) == ("False", "ClaimNotFound")
    assert '"training"' in volumes["message"]
    assert world.status()["phase"] == "Queued"
    world.claim("training")
    eventually("the claim is noticed", lambda: world.condition("VolumesReady")["status"] == "True", 20)


def test_storage_of_another_model_stalls_with_the_trainers_words(world: World) -> None:
    """Exit code 65 is final: the reason says StorageMismatch and quotes the termination message."""
    world.claims()
    node = world.node("a")
    world.create_session()
    world.run_pod("tuned-a1-0", node, state="Starting")
    ended = {"exitCode": 65, "reason": "Error", "message": "StorageMismatch: other/model", "finishedAt": stamp()}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    world.set_pod("tuned-a1-0", **container(waiting, lastState={"terminated": ended}, restartCount=1))
    world.wait_phase("Failed")
    stalled = world.condition("Stalled")
    assert stalled["reason"] == "StorageMismatch"
    assert "other/model" in stalled["message"]


def test_exhausted_budget_ends_in_failed_and_a_raised_limit_heals_it(world: World) -> None:
    """The last cause is named; no pod is made until the spec allows one more."""
    world.claims()
    first, second = world.node("a"), world.node("b")
    world.create_session(recovery={"infrastructure": {"maxAttempts": 0}})
    world.run_pod("tuned-a1-0", first)
    world.wait_phase("Running")
    world.set_ready(first, "Unknown")
    world.wait_phase("Failed")
    stalled = world.condition("Stalled")
    assert stalled["reason"] == "BudgetExhausted"
    assert first in stalled["message"]
    assert world.pod("tuned-a2-0") is None
    world.api.merge(f"{world.sessions_path}/tuned", {"spec": {"recovery": {"infrastructure": {"maxAttempts": 1}}}})
    world.run_pod("tuned-a2-0", second)
    world.wait_phase("Running")


def test_quiet_session_is_not_written(world: World) -> None:
    """At rest neither the session nor its children change, however often it is looked at; no annotation of kopf's."""
    world.claims()
    node = world.node("a")
    world.create_session()
    trainer = world.run_pod("tuned-a1-0", node)
    world.wait_phase("Running")
    time.sleep(1)
    before, asked = versions(world), trainer.asked
    for _ in range(3):
        # A status of the node that changes nothing wakes the watch, as kubelets do all the time.
        world.api.merge(f"/api/v1/nodes/{node}/status", {"status": {"nodeInfo": {"bootID": stamp()}}})
        time.sleep(2)
    eventually("it is asked", lambda: trainer.asked >= asked + 2)
    assert versions(world) == before
    metadata = world.session()["metadata"]
    assert "finalizers" not in metadata
    assert not [name for name in metadata.get("annotations", {}) if "kopf" in name]


def test_recreated_session_of_the_same_name_takes_another_pod_name(world: World) -> None:
    """While the predecessor's pod is still there, its name and attempt are not used again."""
    world.claims()
    node = world.node("a")
    uid = world.create_session()["metadata"]["uid"]
    world.run_pod("tuned-a1-0", node)
    world.wait_phase("Running")
    world.api.delete(f"{world.sessions_path}/tuned")
    eventually("deletion", lambda: world.api.get(f"{world.sessions_path}/tuned") is None)
    assert world.create_session()["metadata"]["uid"] != uid
    pod = world.wait_pod("tuned-a2-0")
    assert pod["metadata"]["ownerReferences"][0]["uid"] == world.session()["metadata"]["uid"]


def versions(world: World) -> dict[str, str]:
    """resourceVersion of everything in the namespace that the operator writes."""
    objects = [world.session(), *world.pods(), *world.api.items(world.path("secrets")), *world.events()]
    return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in objects}


def test_restart_of_the_operator_changes_nothing(world: World, operator: Operator) -> None:
    """Killed and started again: sessions serve on, nothing is written; what it missed meanwhile it makes up for."""
    world.claims()
    first, second = world.node("a"), world.node("b")
    world.create_session()
    world.run_pod("tuned-a1-0", first)
    world.wait_phase("Running")
    before = versions(world)
    operator.stop(signal.SIGKILL)
    operator.start()
    time.sleep(2)
    assert versions(world) == before
    operator.stop(signal.SIGKILL)
    world.set_ready(first, "Unknown")
    world.api.delete(world.path("pods", "tuned-a1-0"))
    operator.start()
    world.run_pod("tuned-a2-0", second)
    status = world.wait_phase("Running")
    assert [entry["reason"] for entry in status["recoveries"]] == ["NodeLost"]


def test_second_start_uses_the_same_master_key(world: World) -> None:
    """The key is made once; only its Secret of that name can be read by the operator."""
    key = world.api.get(f"/api/v1/namespaces/{RELEASE}/secrets/{names.MASTER_KEY_SECRET}")
    assert key
    assert len(base64.b64decode(key["data"]["key"])) == 64
