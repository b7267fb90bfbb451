"""The carrying out of plans for RLJobs: in which order, what a crash leaves, and who cleans up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everloop_operator.api import names, tokens
from everloop_operator.core.jobs.plan import ProgressPoll
from everloop_operator.core.jobs.report import ProgressReport
from everloop_operator.loop import resync
from everloop_operator.loop.cache import NODE_KIND, POD_KIND, Cache
from everloop_operator.loop.job_execute import JobCredentials, JobExecutor
from everloop_operator.loop.job_pass import JobPass
from everloop_operator.loop.lateness import Lateness
from everloop_operator.loop.poller import Poller
from everloop_operator.loop.ports import ClusterError, Key, Unanswered, job_key
from everloop_operator.loop.statuses import StatusWriter
from everloop_operator.loop.work_queue import WorkQueue
from tests.operator.builders import serving
from tests.operator.job_builders import SETTINGS, SPEC
from tests.operator.one_cluster import OneCluster, clock
from tests.operator.world import session_body

KEY = job_key("team", "poems")
MASTER = bytes(range(32))
KEY_SECRET = f"key-{tokens.job_key_id(MASTER, 'uid-poems')}"


def job_body(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.RL_JOB_KIND,
        "metadata": {"name": KEY.name},
        "spec": {**SPEC, **spec},
    }


async def silent(poll: ProgressPoll, token: str) -> ProgressReport:
    raise Unanswered("ConnectTimeout")


class Loop:
    """The whole loop over one cluster with a session that serves, a pass at a time."""

    def __init__(self, cluster: OneCluster | None = None) -> None:
        self.cluster = cluster or OneCluster()
        self.queue, self.cache = WorkQueue(), Cache(clock)
        poller = Poller(silent, self.queue.add, clock, Lateness())
        credentials = JobCredentials(
            token=lambda uid, attempt: f"token {attempt}",
            key=lambda uid, attempt: tokens.job_key(MASTER, uid, attempt),
            key_id=lambda uid: tokens.job_key_id(MASTER, uid),
            release_namespace="system",
        )
        statuses = StatusWriter(self.cluster, self.cache, self.queue.add)
        executor = JobExecutor(self.cluster, self.cache, statuses, credentials, self.queue.add, clock)
        self.passes = JobPass(self.cluster, self.cache, executor, poller, credentials, SETTINGS, clock)
        self.resync = resync.Resync(self.cluster, self.cache, self.queue)

    def add_session(self) -> None:
        status = serving().session.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.cache.put(self.cluster.add({**session_body("tuned"), "status": status}))

    def add_job(self, **spec: Any) -> None:
        self.cache.put(self.cluster.add(job_body(**spec)))

    def status(self) -> dict[str, Any]:
        return dict(self.cluster.objects[KEY]["status"])


@pytest.fixture
async def loop() -> Loop:
    made = Loop()
    made.add_session()
    made.add_job()
    return made


async def test_pod_first_then_the_gateways_key_then_the_drivers(loop: Loop) -> None:
    """Once the pod exists no older key is to be valid, and the driver can't start before its key is."""
    await loop.passes.reconcile(KEY)
    written = loop.cluster.written
    assert written == [
        "apply Pod poems-driver-a1",
        f"apply Secret {KEY_SECRET}",
        "apply Secret poems-driver-a1",
        "status Pending",
    ]
    assert [event.reason for event in loop.cluster.events] == ["PodCreated"]
    del written[:]
    for _ in range(2):
        await loop.passes.reconcile(KEY)
    del written[:]
    await loop.passes.reconcile(KEY)
    assert written == []


@pytest.mark.parametrize("writes", range(5))
async def test_operator_that_dies_between_two_writes_makes_one_pod_and_one_key(loop: Loop, writes: int) -> None:
    """Its successor finds what is there, and derives the same key."""
    left = writes

    class Dying(OneCluster):
        async def apply(self, body: Any) -> Any:
            nonlocal left
            if left == 0:
                raise ClusterError("killed")
            left -= 1
            return await super().apply(body)

        async def write_status(self, body: Any, status: Any) -> Any:
            if left == 0:
                raise ClusterError("killed")
            return await super().write_status(body, status)

    dying = Loop(Dying())
    dying.add_session()
    dying.add_job()
    try:
        await dying.passes.reconcile(KEY)
    except ClusterError:
        pass
    left = 99
    successor = Loop(dying.cluster)
    await successor.resync.once()
    for _ in range(3):
        await successor.passes.reconcile(KEY)
    assert list(dying.cluster.pods) == ["poems-driver-a1"]
    assert sorted(name for _, name in dying.cluster.secrets) == sorted([KEY_SECRET, "poems-driver-a1"])
    assert successor.status()["attempt"] == 1
    assert successor.status()["recoveries"] == []


async def test_driver_that_a_predecessors_pod_hides_is_read_before_it_counts_as_lost(loop: Loop) -> None:
    """An operator that was frozen may know another job's pod under the name that the status has."""
    for _ in range(3):
        await loop.passes.reconcile(KEY)
    [made] = loop.cluster.pods.values()
    [owner] = made["metadata"]["ownerReferences"]
    hiding = {"uid": "uid-before", "resourceVersion": "1", "ownerReferences": [{**owner, "uid": "uid-job-before"}]}
    late = Loop(loop.cluster)
    for body in loop.cluster.objects.values():
        late.cache.put(body)
    late.cache.put_pod({**made, "metadata": {**made["metadata"], **hiding}})
    await late.passes.reconcile(KEY)
    assert list(loop.cluster.pods) == [made["metadata"]["name"]]
    assert (late.status()["attempt"], late.status()["recoveries"]) == (1, [])


@pytest.mark.parametrize("successor", [False, True])
async def test_key_goes_with_a_job_that_no_pass_has_seen(loop: Loop, successor: bool) -> None:
    """An operator that has just begun may hear of the end of a job before it has looked at it, or at its successor."""
    await loop.passes.reconcile(KEY)
    fresh = Loop(loop.cluster)
    await fresh.resync.once()
    assert ("system", KEY_SECRET) in loop.cluster.secrets
    body = loop.cluster.objects.pop(KEY)
    fresh.cache.drop(body)
    if successor:
        another = {**body["metadata"], "uid": "another", "resourceVersion": "999"}
        loop.cluster.objects[KEY] = {**body, "metadata": another, "status": {}}
        fresh.cache.put(loop.cluster.objects[KEY])
    await fresh.passes.reconcile(KEY)
    assert ("system", KEY_SECRET) not in loop.cluster.secrets
    del loop.cluster.written[:]
    await fresh.passes.reconcile(KEY)
    assert [line for line in loop.cluster.written if KEY_SECRET in line] == []


async def test_key_goes_with_the_job(loop: Loop) -> None:
    """No finalizer: whoever sees the deletion deletes the key, and what nobody saw is found by the next resync."""
    await loop.passes.reconcile(KEY)
    body = loop.cluster.objects.pop(KEY)
    loop.cache.drop(body)
    await loop.passes.reconcile(KEY)
    assert ("system", KEY_SECRET) not in loop.cluster.secrets
    loop.add_job()
    await loop.passes.reconcile(KEY)
    del loop.cluster.objects[KEY]
    other = Loop(loop.cluster)
    await other.resync.once()
    assert ("system", KEY_SECRET) not in loop.cluster.secrets


async def test_resync_leaves_the_keys_of_living_jobs(loop: Loop) -> None:
    """Only those whose job is not listed go."""
    await loop.passes.reconcile(KEY)
    await loop.resync.once()
    assert ("system", KEY_SECRET) in loop.cluster.secrets


async def test_suspended_job_has_no_key(loop: Loop) -> None:
    """Its driver is gone: nobody is to be let in in its name."""
    await loop.passes.reconcile(KEY)
    body = loop.cluster.objects[KEY]
    loop.cache.put(loop.cluster.replace({**body, "spec": {**body["spec"], "suspend": True}}))
    await loop.passes.reconcile(KEY)
    assert "delete Pod poems-driver-a1" in loop.cluster.written
    assert ("system", KEY_SECRET) in loop.cluster.secrets, "the driver may save what it has"
    loop.cache.drop_pod(loop.cluster.pods.pop("poems-driver-a1"))
    await loop.passes.reconcile(KEY)
    assert ("system", KEY_SECRET) not in loop.cluster.secrets


async def test_refused_pod_is_reported_and_not_repeated(loop: Loop) -> None:
    """The refusal is remembered: the next pass writes it into the status instead of asking again."""
    loop.cluster.refuse = "quota exceeded"
    assert await loop.passes.reconcile(KEY) == 0.0
    del loop.cluster.written[:]
    await loop.passes.reconcile(KEY)
    assert loop.cluster.written == ["status Failed"]
    assert loop.cluster.secrets == {}


async def test_job_does_not_pass_for_running_while_no_pod_can_be_made(loop: Loop) -> None:
    """A webhook that is down fails every creation: the status says so, and the pass is repeated."""
    for _ in range(2):
        await loop.passes.reconcile(KEY)
    body = loop.cluster.objects[KEY]
    loop.cache.put(loop.cluster.replace({**body, "status": {**body["status"], "phase": "Running"}}))
    loop.cluster.pods.clear()
    loop.cache.finish(POD_KIND, set(), 9999)
    loop.cache.finish(NODE_KIND, set(), 9999)
    loop.cluster.broken = "500: failed calling webhook"
    with pytest.raises(ClusterError, match="webhook"):
        await loop.passes.reconcile(KEY)
    status = loop.status()
    assert (status["phase"], status["attempt"]) == ("Recovering", 1)
    assert "webhook" in next(c for c in status["conditions"] if c["type"] == "Ready")["message"]
    loop.cluster.broken = ""
    await loop.passes.reconcile(KEY)
    assert list(loop.cluster.pods) == ["poems-driver-a2"]


async def test_job_is_woken_by_its_session() -> None:
    """Whatever happens to the session that it names, or owns, is a reason for a pass; another's is none."""
    loop = Loop()
    loop.add_job()
    session = loop.cluster.add(session_body("tuned"))
    assert loop.cache.put(session) == {Key("team", "tuned"), KEY}
    assert loop.cache.put(loop.cluster.add(session_body("other"))) == {Key("team", "other")}
    assert loop.cache.drop(session) == {Key("team", "tuned"), KEY}
    loop.cache.drop(loop.cluster.objects[KEY])
    assert loop.cache.put(loop.cluster.add(session_body("tuned"))) == {Key("team", "tuned")}


async def test_session_that_a_job_makes_or_changes_has_a_pass(loop: Loop) -> None:
    """Its watch shows what the answer to the apply has shown before, which is nothing new."""
    own = Loop()
    own.add_job(session={"template": {"spec": session_body()["spec"]}})
    await own.passes.reconcile(KEY)
    made = own.cluster.objects[Key("team", KEY.name)]
    assert own.cache.put(made) == set()
    assert {await own.queue.take(), await own.queue.take()} == {Key("team", KEY.name), KEY}


async def test_job_hears_of_a_status_that_this_process_wrote(loop: Loop) -> None:
    """A session that serves again is what its job waits for."""
    session = loop.cluster.objects[Key("team", "tuned")]
    writer = StatusWriter(loop.cluster, loop.cache, loop.queue.add)
    await writer.write(Key("team", "tuned"), session, {}, {**session["status"], "phase": "Recovering"}, urgent=True)
    assert await asyncio.wait_for(loop.queue.take(), 1) == KEY


async def test_drivers_do_not_count_as_pods_of_sessions(loop: Loop) -> None:
    """The cap on nodes that are left counts those with GPUs at stake."""
    await loop.passes.reconcile(KEY)
    pod = loop.cluster.pods["poems-driver-a1"]
    woken = loop.cache.put_pod(loop.cluster.stamped({**pod, "spec": {**pod["spec"], "nodeName": "node-a"}}))
    assert woken == {KEY}
    assert dict(loop.cache.hosting()) == {}
    await asyncio.sleep(0)
