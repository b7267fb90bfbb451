"""What a pass over an RLJob reads before it decides, and which of its writes are made once."""

from __future__ import annotations

from typing import Any

import pytest

from everloop_operator.api import names, tokens
from everloop_operator.api.training_session import TrainingSessionSpec
from everloop_operator.core.jobs.plan import ProgressPoll
from everloop_operator.core.jobs.report import ProgressReport
from everloop_operator.core.observed import Answer
from everloop_operator.core.refusals import PATIENCE_SECONDS
from everloop_operator.loop.cache import Cache
from everloop_operator.loop.job_execute import JobCredentials, JobExecutor
from everloop_operator.loop.job_pass import JobPass
from everloop_operator.loop.ports import Body, ClusterError, Key
from everloop_operator.loop.statuses import StatusWriter
from tests.operator import builders
from tests.operator.job_builders import SETTINGS
from tests.operator.one_cluster import OneCluster, clock
from tests.operator.test_rl_job_loop import KEY, KEY_SECRET, MASTER, job_body
from tests.operator.world import session_body

POD = "poems-driver-a1"
NODE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "node-a", "uid": "uid-node-a", "resourceVersion": "1"},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}


class Recorder(OneCluster):
    """Remembers how pods are deleted, and what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.forced: list[bool] = []
        self.read: list[str] = []
        self.fails_to_delete = False

    async def delete_pod(self, namespace: str, name: str, *, uid: str, force: bool) -> None:
        if self.fails_to_delete:
            raise ClusterError("500")
        self.forced.append(force)
        await super().delete_pod(namespace, name, uid=uid, force=force)

    async def node(self, name: str) -> Body:
        self.read.append(name)
        return await super().node(name)


class Questions:
    """A poller that knows nothing, and remembers whom it is asked about and whom to ask."""

    def __init__(self) -> None:
        self.about: list[str] = []
        self.wanted: list[tuple[ProgressPoll | None, str]] = []

    def answer(self, key: Key, pod_uid: str) -> Answer[ProgressReport]:
        self.about.append(pod_uid)
        return Answer()

    def want(self, key: Key, poll: ProgressPoll | None, token: str = "") -> None:
        self.wanted.append((poll, token))


class Operator:
    """One operator over one cluster, a pass at a time."""

    def __init__(self, cluster: Recorder | None = None, *, nodes_watched: bool = True) -> None:
        self.cluster = cluster or Recorder()
        self.cache = Cache(clock, nodes_watched=nodes_watched)
        self.questions = Questions()
        credentials = JobCredentials(
            token=lambda uid, attempt: f"token of {attempt}",
            key=lambda uid, attempt: tokens.job_key(MASTER, uid, attempt),
            key_id=lambda uid: tokens.job_key_id(MASTER, uid),
            release_namespace="system",
        )
        statuses = StatusWriter(self.cluster, self.cache, lambda key: None)
        executor = JobExecutor(self.cluster, self.cache, statuses, credentials, lambda key: None, clock)
        poller: Any = self.questions
        self.passes = JobPass(self.cluster, self.cache, executor, poller, credentials, SETTINGS, clock)

    def learn(self) -> None:
        """See objects and nodes; pods are seen by `see`."""
        for body in self.cluster.objects.values():
            self.cache.put(body)
        for body in self.cluster.nodes.values():
            self.cache.put_node(body)

    def see(self, name: str = POD, **fields: Any) -> None:
        """What the watch shows of a pod; `fields` are of its status."""
        body = self.cluster.pods[name]
        status = {**body.get("status", {}), **fields}
        self.cluster.pods[name] = self.cluster.stamped({**body, "status": status})
        self.cache.put_pod(self.cluster.pods[name])

    def place(self, node: str) -> None:
        """Bind the pod to a node."""
        body = self.cluster.pods[POD]
        self.cluster.pods[POD] = self.cluster.stamped({**body, "spec": {**body["spec"], "nodeName": node}})

    def edit(self, status: dict[str, Any] | None = None, **spec: Any) -> None:
        """A person changes the spec, or another operator has written the status."""
        body = self.cluster.objects[KEY]
        changed = {**body, "spec": {**body["spec"], **spec}, "status": {**body.get("status", {}), **(status or {})}}
        self.cache.put(self.cluster.replace(changed))

    async def passed(self, times: int = 1) -> list[str]:
        """What some passes write."""
        del self.cluster.written[:]
        for _ in range(times):
            await self.passes.reconcile(KEY)
        return list(self.cluster.written)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.cluster.objects[KEY]["status"])


@pytest.fixture
async def operator() -> Operator:
    """One whose job has its first driver."""
    made = Operator()
    status = builders.serving().session.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    made.cluster.add({**session_body("tuned"), "status": status})
    made.cluster.add(job_body())
    made.learn()
    await made.passed(2)
    return made


# --- what is read before a loss is believed -------------------------------------------------------------------------


async def test_pod_that_only_the_cache_lacks_is_not_lost(operator: Operator) -> None:
    """A lack means a new attempt, so it is looked up."""
    successor = Operator(operator.cluster)
    successor.learn()
    await successor.passed(2)
    assert list(operator.cluster.pods) == [POD]


async def test_pod_that_only_cache_and_status_lack_is_not_lost(operator: Operator) -> None:
    """The pass that made it has said which attempt it is, and the next one would have said where it is."""
    operator.see(phase="Failed")
    await operator.passed()
    assert (operator.status["attempt"], operator.status.get("pod")) == (2, None)
    before = list(operator.cluster.pods)
    successor = Operator(operator.cluster)
    successor.learn()
    await successor.passed()
    assert list(operator.cluster.pods) == before


async def test_a_thawed_operator_does_nothing_about_a_world_gone_by(operator: Operator) -> None:
    """Another one has replaced the driver since: that one is neither replaced nor deleted."""
    await operator.passed()
    other = Operator(operator.cluster)
    other.learn()
    other.see(phase="Failed")
    await other.passed()
    before = list(operator.cluster.pods)
    assert (other.status["attempt"], len(before)) == (2, 2)
    operator.see(phase="Failed")
    assert (await operator.passed(), list(operator.cluster.pods)) == ([], before)


async def test_node_that_only_the_cache_lacks_is_not_gone(operator: Operator) -> None:
    """Neither of a pod nor of a status whose pod is gone."""
    operator.cluster.nodes["node-a"] = NODE
    operator.place("node-a")
    operator.see(phase="Running", podIP="127.0.0.9", conditions=[{"type": "Ready", "status": "True"}])
    await operator.passed(2)
    assert (list(operator.cluster.pods), operator.status["phase"]) == ([POD], "Running")
    operator.cache.drop_pod(operator.cluster.pods.pop(POD))
    successor = Operator(operator.cluster)
    successor.learn()
    del successor.cluster.nodes["node-a"]
    successor.cluster.nodes["node-a"] = NODE
    await successor.passed()
    assert successor.status["recoveries"][-1]["reason"] == "PodLost"


async def test_nodes_that_may_not_be_seen_are_not_asked_for(operator: Operator) -> None:
    """Each question would be refused."""
    operator.place("node-a")
    blind = Operator(operator.cluster, nodes_watched=False)
    blind.learn()
    blind.see()
    del operator.cluster.read[:]
    await blind.passed(2)
    assert (operator.cluster.read, list(operator.cluster.pods)) == ([], [POD])


async def test_pods_of_another_job_of_the_name_are_left_alone(operator: Operator) -> None:
    """A job that is created again takes neither the pods nor the numbers of the one before."""
    body = operator.cluster.pods[POD]
    [owner] = body["metadata"]["ownerReferences"]
    foreign = {**body, "metadata": {**body["metadata"], "ownerReferences": [{**owner, "uid": "uid-before"}]}}
    operator.cluster.pods[POD] = operator.cluster.stamped(foreign)
    other = Operator(operator.cluster)
    other.edit(status={"attempt": 0, "pod": None, "phase": ""})
    other.learn()
    other.see()
    written = await other.passed()
    assert "apply Pod poems-driver-a2" in written
    assert f"delete Pod {POD}" not in written


# --- whom to ask ----------------------------------------------------------------------------------------------------


async def test_reader_of_the_latest_attempt_is_asked_with_its_token(operator: Operator) -> None:
    """And it is heard though its pod is gone; a leftover of an earlier attempt is not."""
    operator.see(phase="Running", podIP="127.0.0.9", conditions=[{"type": "Ready", "status": "True"}])
    await operator.passed()
    poll, token = operator.questions.wanted[-1]
    assert poll is not None
    assert (poll.ip, poll.attempt, token) == ("127.0.0.9", 1, "token of 1")
    assert operator.questions.about[-1] == f"uid-{POD}"
    operator.edit(status={"attempt": 2, "pod": {"name": "poems-driver-a2", "uid": "uid-second"}})
    await operator.passed()
    assert operator.questions.about[-1] == "uid-second"


# --- writes that are made once --------------------------------------------------------------------------------------


async def test_key_is_deleted_once(operator: Operator) -> None:
    """A job that rests for long costs nothing."""
    operator.edit(suspend=True)
    operator.cache.drop_pod(operator.cluster.pods.pop(POD))
    assert f"delete Secret {KEY_SECRET}" in await operator.passed()
    assert [line for line in await operator.passed(3) if line.startswith("delete Secret key")] == []


async def test_secret_of_somebody_else_holds_up_nothing_but_the_driver() -> None:
    """It is told of once and asked for again; the status is written meanwhile."""
    operator = Operator()
    status = builders.serving().session.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    operator.cluster.add({**session_body("tuned"), "status": status})
    operator.cluster.add(job_body())
    operator.cluster.taken = f"Secret {POD}"
    operator.learn()
    await operator.passed()
    waits = [await operator.passes.reconcile(KEY) for _ in range(2)]
    assert [wait is not None and wait <= PATIENCE_SECONDS for wait in waits] == [True, True]
    assert operator.status["attempt"] == 1
    told = {(event.reason, event.key) for event in operator.cluster.events if event.type == "Warning"}
    assert told == {(names.EVENT_CHILD_REFUSED, "1")}
    operator.cluster.taken = ""
    assert f"apply Secret {POD}" in await operator.passed()
    assert f"apply Secret {POD}" not in await operator.passed()


async def test_secret_of_an_attempt_is_deleted_once(operator: Operator) -> None:
    """When its pod is gone."""
    operator.edit(suspend=True)
    operator.cache.drop_pod(operator.cluster.pods.pop(POD))
    assert (await operator.passed(3)).count(f"delete Secret {POD}") == 1


async def test_key_of_a_job_that_another_has_taken_the_name_of_is_deleted(operator: Operator) -> None:
    """Though no pass has seen the moment between the two."""
    body = operator.cluster.objects[KEY]
    again = {**body, "metadata": {**body["metadata"], "uid": "uid-again"}, "status": {}}
    operator.cluster.objects[KEY] = operator.cluster.stamped(again)
    operator.cache.put(operator.cluster.objects[KEY])
    await operator.passed()
    assert ("system", KEY_SECRET) not in operator.cluster.secrets


async def test_job_that_was_never_seen_is_forgotten_without_a_word(operator: Operator) -> None:
    """Its key, if it has one, is found by the list of all keys."""
    stranger = Operator(operator.cluster)
    assert await stranger.passed() == []
    assert ("system", KEY_SECRET) in operator.cluster.secrets


async def test_deleted_job_is_not_written_to(operator: Operator) -> None:
    """Neither status nor children: what it owns goes with it."""
    body = operator.cluster.objects[KEY]
    deleted = {**body, "metadata": {**body["metadata"], "deletionTimestamp": "2026-05-01T12:00:00Z"}}
    operator.cache.put(operator.cluster.stamped(deleted))
    assert await operator.passed() == [f"delete Secret {KEY_SECRET}"]


async def test_pod_is_deleted_as_the_plan_says(operator: Operator) -> None:
    """With its grace period, and by force once that has been waited for in vain."""
    operator.edit(suspend=True)
    await operator.passed()
    body = operator.cluster.pods[POD]
    leaving = {"deletionTimestamp": "2026-05-01T11:00:00Z", "deletionGracePeriodSeconds": 30}
    operator.cache.put_pod(operator.cluster.stamped({**body, "metadata": {**body["metadata"], **leaving}}))
    await operator.passed()
    assert operator.cluster.forced == [False, True]


async def test_own_session_is_deleted_when_its_time_is_over(operator: Operator) -> None:
    """By the plan's word."""
    spec = TrainingSessionSpec.model_validate(builders.SPEC).model_dump(mode="json", by_alias=True, exclude_none=True)
    owner = {"apiVersion": names.API_VERSION, "kind": names.RL_JOB_KIND, "name": "poems", "uid": "uid-poems"}
    own = {**session_body("poems"), "spec": spec}
    own["metadata"] = {**own["metadata"], "ownerReferences": [{**owner, "controller": True}]}
    operator.cluster.add(own)
    operator.learn()
    finished = {"phase": "Completed", "finishTime": "2026-05-01T11:00:00Z"}
    operator.edit(status=finished, session={"template": {"spec": spec}}, ttlSecondsAfterFinished=1)
    assert "delete TrainingSession poems" in await operator.passed()


async def test_failure_of_another_write_is_not_told_as_a_missing_driver(operator: Operator) -> None:
    """Only a driver that could not be made is a reason to say that there is none."""
    before = operator.status
    operator.edit(suspend=True)
    operator.cluster.fails_to_delete = True
    with pytest.raises(ClusterError):
        await operator.passed()
    assert operator.status["phase"] == before["phase"]
