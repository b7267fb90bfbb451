"""Queue, cache and the carrying out of plans: what happens when signals come late, twice, or never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.api.training_session_status import ModelStatus
from everloop_operator.core.plan import Poll, plan
from everloop_operator.core.report import TrainerReport
from everloop_operator.loop import liveness, resync
from everloop_operator.loop.cache import NODE_KIND, POD_KIND, Cache
from everloop_operator.loop.execute import Executor
from everloop_operator.loop.lateness import Lateness
from everloop_operator.loop.observe import Observer
from everloop_operator.loop.poller import Poller
from everloop_operator.loop.ports import ClusterError, Conflict, Key, Listed, Unanswered
from everloop_operator.loop.session_pass import SessionPass
from everloop_operator.loop.statuses import StatusWriter
from everloop_operator.loop.work_queue import WorkQueue
from tests.operator.builders import NOW, SETTINGS
from tests.operator.one_cluster import OneCluster, clock
from tests.operator.world import session_body

KEY = Key("team", "tuned")


class Silent:
    """A trainer that never answers."""

    async def ask(self, poll: Poll, token: str) -> TrainerReport:
        raise Unanswered("ConnectTimeout")


class Loop:
    """The whole loop over one cluster, a pass at a time."""

    def __init__(self) -> None:
        self.cluster = OneCluster()
        self.queue, self.cache = WorkQueue(), Cache(clock)
        self.poller = Poller(Silent().ask, self.queue.add, clock, Lateness())
        statuses = StatusWriter(self.cluster, self.cache, self.queue.add)
        self.executor = Executor(self.cluster, self.cache, statuses, lambda uid, attempt: f"token {attempt}", clock)
        self.observer = Observer(self.cluster, self.cache, self.poller, clock)
        self.passes = SessionPass(
            self.cache, self.observer, self.executor, self.poller, lambda uid, attempt: "", SETTINGS
        )


async def test_pass_writes_once_and_then_rests() -> None:
    """First pass: secret, pod, status, events. Second pass, from the same state: nothing."""
    loop = Loop()
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))
    await loop.passes.reconcile(KEY)
    assert loop.cluster.written == ["apply Secret tuned-a1-token", "apply Pod tuned-a1-0", "status Pending"]
    assert [event.reason for event in loop.cluster.events] == ["PodCreated"]
    await loop.passes.reconcile(KEY)  # the status says now that the pod exists
    del loop.cluster.written[:]
    await loop.passes.reconcile(KEY)
    assert loop.cluster.written == []


async def test_claims_are_read_again_once_the_pod_has_its_node() -> None:
    """Until then another claim may take the name; from then on the pod keeps the claim from going away."""
    loop = Loop()
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))

    async def claim_uid() -> str:
        for _ in range(2):
            await loop.passes.reconcile(KEY)
        return str(loop.cluster.objects[KEY]["status"]["storage"]["claimUID"])

    before = await claim_uid()
    pod = loop.cluster.pods["tuned-a1-0"]
    placed = loop.cluster.stamped({**pod, "spec": {**pod["spec"], "nodeName": "node-a"}})
    loop.cluster.pods["tuned-a1-0"] = placed
    loop.cache.put_pod(placed)
    placed_uid = await claim_uid()
    assert placed_uid != before
    assert await claim_uid() == placed_uid


async def test_own_pod_is_known_before_the_watch_shows_it() -> None:
    """The answer to the apply goes into the cache: a pass that follows at once makes no second pod."""
    loop = Loop()
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))
    for _ in range(3):
        await loop.passes.reconcile(KEY)
    assert list(loop.cluster.pods) == ["tuned-a1-0"]


async def test_pod_that_the_cache_lacks_is_read_before_it_counts_as_lost() -> None:
    """A restarted operator, or a missed event, must not cost an attempt."""
    loop = Loop()
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))
    await loop.passes.reconcile(KEY)
    await loop.passes.reconcile(KEY)
    late = Loop()
    late.cluster.pods, late.cluster.version = loop.cluster.pods, 1000
    late.cache.put(loop.cluster.objects[KEY])
    await late.passes.reconcile(KEY)
    assert [line for line in late.cluster.written if "Pod" in line] == []


async def test_failed_status_write_is_told_later() -> None:
    """Events only after the status: a conflict leaves no story that never happened, and the next pass tells it."""
    loop = Loop()
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))
    loop.cluster.conflict = True
    with pytest.raises(Conflict):
        await loop.passes.reconcile(KEY)
    assert loop.cluster.events == []
    loop.cluster.conflict = False
    await loop.passes.reconcile(KEY)
    assert loop.cluster.objects[KEY]["status"]["attempt"] == 1


async def test_refused_pod_is_reported_and_not_repeated() -> None:
    """The refusal is remembered: the next pass writes it into the status instead of asking again."""
    loop = Loop()
    loop.cluster.refuse = "limits: Invalid value"
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))
    assert await loop.passes.reconcile(KEY) == 0.0
    del loop.cluster.written[:]
    await loop.passes.reconcile(KEY)
    assert loop.cluster.written == ["status Failed"]


async def test_lost_session_does_not_pass_for_serving_while_no_pod_can_be_made() -> None:
    """A webhook that died with the same node fails every creation: the status says so, and the pass is repeated."""
    loop = Loop()
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))
    for _ in range(2):
        await loop.passes.reconcile(KEY)
    body = loop.cluster.objects[KEY]
    loop.cache.put(loop.cluster.replace({**body, "status": {**body["status"], "phase": "Running"}}))
    loop.cluster.pods.clear()
    loop.cache.finish(POD_KIND, set(), 9999)
    loop.cluster.broken = "500: failed calling webhook"
    for _ in range(2):
        with pytest.raises(ClusterError, match="webhook"):
            await loop.passes.reconcile(KEY)
        status = loop.cluster.objects[KEY]["status"]
        assert (status["phase"], status["attempt"]) == ("Recovering", 1)
        [pods_ready] = [item for item in status["conditions"] if item["type"] == "PodsReady"]
        assert (pods_ready["reason"], pods_ready["message"]) == ("PodCreating", loop.cluster.broken)
    loop.cluster.broken = ""
    await loop.passes.reconcile(KEY)
    assert list(loop.cluster.pods) == ["tuned-a2-0"]
    assert [entry["id"] for entry in loop.cluster.objects[KEY]["status"]["recoveries"]] == ["a2"]


async def test_event_that_is_refused_does_not_stop_the_session() -> None:
    """In a namespace that is being deleted, for instance, no event can be made."""
    loop = Loop()
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))
    loop.cluster.refuse_events = True
    await loop.passes.reconcile(KEY)
    assert loop.cluster.written[-1] == "status Pending"


async def test_progress_is_written_every_fifteen_seconds_at_most() -> None:
    """What is not urgent is put off, and the pass says until when."""
    loop = Loop()
    loop.cache.put(loop.cluster.add(session_body(KEY.name)))
    await loop.passes.reconcile(KEY)
    await loop.passes.reconcile(KEY)
    body = loop.cache.get(KEY)
    assert body is not None
    observed = await loop.observer.observe(KEY, body, None)
    todo = plan(observed, SETTINGS)
    assert todo.status is not None
    todo = replace(todo, status=todo.status.model_copy(update={"models": [ModelStatus(id="m-1", step=3)]}))
    delay = await loop.executor.execute(KEY, body, observed, todo)
    assert delay is not None
    assert 0 < delay <= 15


# --- queue ----------------------------------------------------------------------------------------------------------


async def test_queue_holds_a_key_once() -> None:
    """However often it is added."""
    queue = WorkQueue()
    for _ in range(3):
        queue.add(KEY)
    assert await queue.take() == KEY
    queue.done(KEY)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take(), 0.01)


async def test_signal_during_a_pass_asks_for_another() -> None:
    """A key in work is never given out a second time, and no signal is lost."""
    queue = WorkQueue()
    queue.add(KEY)
    await queue.take()
    queue.add(KEY)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take(), 0.01)
    queue.done(KEY)
    assert await asyncio.wait_for(queue.take(), 1) == KEY


async def test_failures_back_off() -> None:
    """The delay grows with each failure and starts anew after a success."""
    queue = WorkQueue()
    delays = []
    for _ in range(9):
        queue.add(KEY)
        await queue.take()
        delays.append(queue.failed(KEY))
    assert delays[0] < 1 < delays[3] < delays[8] <= 75
    queue.add(KEY)
    await queue.take()
    queue.done(KEY)
    queue.add(KEY)
    await queue.take()
    assert queue.failed(KEY) < 1
    queue.close()


async def test_a_later_schedule_replaces_an_earlier_one() -> None:
    """The last pass knows best when to look again."""
    queue = WorkQueue()
    queue.schedule(KEY, 0.0)
    queue.schedule(KEY, None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take(), 0.02)
    queue.schedule(KEY, 0.0)
    assert await asyncio.wait_for(queue.take(), 1) == KEY


# --- cache ----------------------------------------------------------------------------------------------------------


def pod_body(version: int, uid: str = "u", phase: str = "Pending") -> dict[str, Any]:
    return {
        "metadata": {
            "name": "tuned-a1-0",
            "namespace": KEY.namespace,
            "uid": uid,
            "resourceVersion": str(version),
            "creationTimestamp": "2026-05-01T11:00:00Z",
            "labels": {names.LABEL_SESSION: KEY.name, names.LABEL_ATTEMPT: "1"},
        },
        "spec": {"nodeName": "node-a"},
        "status": {"phase": phase},
    }


def node_body(version: int, ready: str, uid: str = "n") -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    metadata = {"name": "node-a", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}, "status": {"conditions": conditions}}


def test_old_news_is_ignored() -> None:
    """An event that is older than what is known changes nothing; one that changes nothing wakes nobody."""
    cache = Cache(clock)
    assert cache.put_pod(pod_body(5, phase="Running")) == {KEY}
    assert cache.put_pod(pod_body(4)) == set()
    assert cache.put_pod(pod_body(6, phase="Running")) == set()
    assert cache.pods(KEY)[0].pod.phase == "Running"


def test_late_deletion_of_a_predecessor_is_ignored() -> None:
    """A pod of the same name with another UID stays."""
    cache = Cache(clock)
    cache.put_pod(pod_body(5, uid="new"))
    cache.drop_pod(pod_body(4, uid="old"))
    assert [item.pod.uid for item in cache.pods(KEY)] == ["new"]


def test_node_wakes_the_sessions_on_it() -> None:
    """And only when it changed."""
    cache = Cache(clock)
    cache.put_pod(pod_body(1))
    cache.put_node(node_body(2, "True"))
    assert cache.put_node(node_body(3, "True")) == set()
    assert cache.put_node(node_body(4, "False")) == {KEY}
    assert cache.nodes()["node-a"].not_ready_since == NOW
    assert cache.drop_node(node_body(5, "False")) == {KEY}


def test_node_wakes_nobody_who_has_left_it() -> None:
    """And everybody else: whose pod would like to be there, and whose status names it though the pod is gone."""
    cache = Cache(clock)
    cache.put_node(node_body(1, "True"))
    cache.put_pod(pod_body(2))
    elsewhere = pod_body(3)
    elsewhere["spec"]["nodeName"] = "node-b"
    cache.put_pod(elsewhere)
    assert cache.put_node(node_body(4, "False")) == set()

    elsewhere = pod_body(5)
    elsewhere["spec"]["nodeName"] = "node-b"
    elsewhere["metadata"]["annotations"] = {names.ANNOTATION_AVOIDED_NODES: "node-a,node-c"}
    cache.put_pod(elsewhere)
    assert cache.put_node(node_body(6, "True")) == {KEY}
    cache.drop_pod(elsewhere)
    assert cache.put_node(node_body(7, "False")) == set()

    body = {**session_body(KEY.name), "status": {"pod": {"name": "tuned-a1-0", "node": "node-a"}}}
    metadata = {"namespace": KEY.namespace, "name": KEY.name, "uid": "s"}
    cache.put({**body, "metadata": {**metadata, "resourceVersion": "8"}})
    assert cache.put_node(node_body(9, "True")) == {KEY}
    cache.put({**session_body(KEY.name), "metadata": {**metadata, "resourceVersion": "10"}})
    assert cache.put_node(node_body(11, "False")) == set()


def test_object_comes_out_of_the_cache_as_it_was_read() -> None:
    """Packed and unpacked, and without what nobody reads."""
    metadata = {"namespace": KEY.namespace, "name": KEY.name, "uid": "s", "resourceVersion": "7"}
    status = {"phase": "Running", "endpoint": "http://gätewäy"}
    body = {**session_body(KEY.name), "metadata": metadata, "status": status}
    cache = Cache(clock)
    cache.put({**body, "metadata": {**metadata, "managedFields": [{"manager": "somebody"}]}})
    assert cache.get(KEY) == body


async def test_resync_reads_lists_page_by_page() -> None:
    """An object counts as gone only if no page has it; one page's version is not another's."""

    class Paged(OneCluster):
        async def list_sessions(self) -> AsyncIterator[Listed]:
            for key, version in ((KEY, 50), (Key("team", "second"), 60)):
                yield Listed((self.objects[key],), version)

    cluster, cache, queue = Paged(), Cache(clock), WorkQueue()
    for name in (KEY.name, "second"):
        cluster.add(session_body(name))
    ghost, young = (cluster.stamped(session_body(name), namespace="team") for name in ("ghost", "young"))
    for body, version in ((ghost, "40"), (young, "55")):
        cache.put({**body, "metadata": {**body["metadata"], "resourceVersion": version}})
    await resync.Resync(cluster, cache, queue).once()
    assert set(cache.keys()) == {KEY, Key("team", "second"), Key("team", "young")}
    assert queue.depth() == 4, "who is gone has a pass of its own, which tidies up"


async def test_resync_that_is_asked_for_comes_soon_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the interrupted watches of all kinds have missed; the others wait for their time."""
    monkeypatch.setattr(resync, "GATHERING_SECONDS", 0.05)

    class Counting(OneCluster):
        def __init__(self) -> None:
            super().__init__()
            self.lists, self.listed = 0, asyncio.Event()

        async def list_nodes(self) -> AsyncIterator[Listed]:
            self.lists += 1
            self.listed.set()
            yield Listed((), self.version)

    cluster = Counting()
    again = resync.Resync(cluster, Cache(clock), WorkQueue())
    task = asyncio.create_task(again.run())
    await asyncio.sleep(0.1)
    assert cluster.lists == 0
    for _ in range(4):
        again.soon()
        await asyncio.sleep(0.005)
    await asyncio.wait_for(cluster.listed.wait(), 5)
    await asyncio.sleep(0.2)
    assert cluster.lists == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_resync_removes_ghosts() -> None:
    """A deletion that the watch missed is healed by the next complete list."""
    cache = Cache(clock)
    cache.put_pod(pod_body(5))
    cache.put_node(node_body(5, "True"))
    cache.begin_resync()
    cache.finish(POD_KIND, set(), 9)
    cache.finish(NODE_KIND, set(), 9)
    assert (cache.pods(KEY), cache.nodes()) == ([], {})


def test_resync_keeps_what_is_newer_than_its_lists() -> None:
    """What was created after the list was read stays; what was deleted meanwhile does not come back."""
    cache = Cache(clock)
    cache.begin_resync()
    cache.put_pod(pod_body(12))
    cache.drop_node(node_body(11, "True"))
    cache.finish(POD_KIND, set(), 9)
    cache.finish(NODE_KIND, cache.take(NODE_KIND, Listed((node_body(8, "True"),), 9)), 9)
    assert [item.version for item in cache.pods(KEY)] == [12]
    assert cache.nodes() == {}


# --- liveness -------------------------------------------------------------------------------------------------------


async def test_liveness_notices_a_key_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose workers are stuck must not look alive."""
    queue = WorkQueue()
    alive = liveness.Liveness(queue, resync.Resync(OneCluster(), Cache(clock), queue))
    queue.add(KEY)
    alive.check()
    monkeypatch.setattr(liveness, "LONGEST_WAIT_SECONDS", -1.0)
    with pytest.raises(liveness.Dead, match="waited for a pass"):
        alive.check()


async def test_liveness_notices_missing_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither must one that can't read the cluster any more."""
    queue = WorkQueue()
    alive = liveness.Liveness(queue, resync.Resync(OneCluster(), Cache(clock), queue))
    monkeypatch.setattr(liveness, "PERIOD_SECONDS", -1.0)
    with pytest.raises(liveness.Dead, match="no complete list"):
        alive.check()
