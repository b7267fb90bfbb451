"""What happens while the operator is at work: edits during a slow pass, calls that fail, objects that break a pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

from everloop_operator.api import names
from everloop_operator.core.plan import Poll
from everloop_operator.core.refusals import PATIENCE_SECONDS
from everloop_operator.core.report import TrainerReport
from everloop_operator.loop import work_queue
from everloop_operator.loop.cache import Cache, key_of
from everloop_operator.loop.execute import Executor
from everloop_operator.loop.lateness import Lateness
from everloop_operator.loop.observe import Observer
from everloop_operator.loop.poller import Poller
from everloop_operator.loop.ports import Absent, Body, ClusterError, Conflict, Key, Refused, Unanswered
from everloop_operator.loop.session_pass import SessionPass
from everloop_operator.loop.statuses import StatusWriter
from everloop_operator.loop.work_queue import WorkQueue
from everloop_operator.loop.worker import Worker
from tests.operator.builders import NOW, SETTINGS, ago, text
from tests.operator.one_cluster import OneCluster, clock
from tests.operator.world import session_body

KEY = Key("team", "tuned")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that failed is repeated at once."""
    monkeypatch.setattr(work_queue, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(work_queue, "LONGEST_BACKOFF_SECONDS", 0.01)


async def until(true: Callable[[], bool]) -> None:
    """Lets other tasks run until this holds."""
    async with asyncio.timeout(10):
        for _ in iter(true, True):
            await asyncio.sleep(0.001)


async def silent(poll: Poll, token: str) -> TrainerReport:
    raise Unanswered("ConnectTimeout")


class Guarded(OneCluster):
    """It refuses a status that was made from an older object, and its pods and deletions can be held up or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()
        self.made: list[Body] = []
        self.fail_deletions = 0

    def edit(self, **change: Any) -> Body:
        """A person changes the spec."""
        body = self.objects[KEY]
        generation = body["metadata"]["generation"] + 1
        self.objects[KEY] = self.stamped({**body, "spec": {**body["spec"], **change}}, generation=generation)
        return self.objects[KEY]

    async def apply(self, body: Body) -> Body:
        if body["kind"] == "Pod":
            await self.open.wait()
            self.made.append(body)
        return await super().apply(body)

    async def delete_pod(self, namespace: str, name: str, *, uid: str, force: bool) -> None:
        if self.fail_deletions:
            self.fail_deletions -= 1
            raise ClusterError("500")
        await super().delete_pod(namespace, name, uid=uid, force=force)
        self.pods.pop(name, None)

    async def write_status(self, body: Body, status: Body) -> Body:
        if body["metadata"]["resourceVersion"] != self.objects[key_of(body)]["metadata"]["resourceVersion"]:
            raise Conflict("somebody wrote")
        return await super().write_status(body, status)


class Operator:
    """Workers over one cluster; every change of an object is a signal."""

    def __init__(self, cluster: Guarded) -> None:
        self.cluster = cluster
        self.queue, self.cache = WorkQueue(), Cache(clock)
        self.poller: Poller[Poll, TrainerReport] = Poller(silent, self.queue.add, clock, Lateness())
        statuses = StatusWriter(cluster, self.cache, self.queue.add)
        executor = Executor(cluster, self.cache, statuses, lambda uid, attempt: f"token {attempt}", clock)
        observer = Observer(cluster, self.cache, self.poller, clock)
        passes = SessionPass(self.cache, observer, executor, self.poller, lambda uid, attempt: "", SETTINGS)
        self.reconcile = passes.reconcile
        self.worker = Worker(self.queue, {names.TRAINING_SESSION_KIND: self.reconcile})

    def seen(self, body: Body) -> None:
        self.cache.put(body)
        self.queue.add(KEY)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.cluster.objects[KEY].get("status") or {})

    def image(self) -> str:
        """Of the newest pod."""
        return str(self.cluster.made[-1]["spec"]["containers"][0]["image"]) if self.cluster.made else ""


@asynccontextmanager
async def running(cluster: Guarded) -> AsyncIterator[Operator]:
    """An operator process; what it knew is gone when it ends."""
    operator = Operator(cluster)
    task = asyncio.create_task(operator.worker.run())
    for pod in cluster.pods.values():
        operator.cache.put_pod(pod)
    for body in cluster.objects.values():
        operator.seen(body)
    try:
        yield operator
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        operator.queue.close()
        await operator.poller.close()


@pytest.mark.parametrize("killed", [False, True], ids=["the same process", "killed in the middle"])
async def test_edits_during_a_slow_pass_are_carried_out(killed: bool) -> None:
    """The last of several counts, though the pass under way knew an older spec; no pod is made in between."""
    cluster = Guarded()
    cluster.add(session_body(KEY.name, image="v:1"))
    cluster.open.clear()
    async with running(cluster) as operator:
        await until(lambda: "apply Secret tuned-a1-token" in cluster.written)
        for image in ("v:2", "v:3"):
            operator.seen(cluster.edit(image=image))
        if not killed:
            cluster.open.set()
            await until(lambda: operator.image() == "v:3" and operator.status["observedGeneration"] == 3)
    cluster.open.set()
    async with running(cluster) as operator:
        await until(lambda: operator.image() == "v:3" and operator.status["observedGeneration"] == 3)
        await until(lambda: operator.queue.depth() == 0)
    names_ = [body["metadata"]["name"] for body in cluster.made]
    assert names_ == (["tuned-a1-0"] if killed else ["tuned-a1-0", "tuned-a2-0"])
    assert list(cluster.pods) == names_[-1:]


async def test_a_thawed_operator_does_nothing_about_a_world_gone_by() -> None:
    """Its node was frozen, and another one has replaced the pod since: that pod is neither replaced nor deleted."""
    cluster = Guarded()
    cluster.add(session_body(KEY.name))
    frozen, other = Operator(cluster), Operator(cluster)
    for _ in range(2):
        frozen.cache.put(cluster.objects[KEY])
        await frozen.reconcile(KEY)
    first = cluster.pods["tuned-a1-0"]
    other.cache.put(cluster.objects[KEY])
    other.cache.put_pod(cluster.stamped({**first, "status": {"phase": "Failed"}}))
    await other.reconcile(KEY)
    assert other.status["attempt"] == 2
    ended = {"exitCode": names.EXIT_FENCED, "message": "superseded by attempt 2"}
    container = {"name": names.TRAINER_CONTAINER, "state": {"terminated": ended}}
    frozen.cache.put_pod(cluster.stamped({**first, "status": {"phase": "Running", "containerStatuses": [container]}}))
    for _ in range(3):
        with suppress(ClusterError):  # passes that fail are repeated
            await frozen.reconcile(KEY)
    assert [body["metadata"]["name"] for body in cluster.made] == ["tuned-a1-0", "tuned-a2-0"]
    assert "delete Pod tuned-a2-0" not in cluster.written
    assert other.status["attempt"] == 2
    for operator in (frozen, other):
        await operator.poller.close()


async def test_a_pod_that_only_cache_and_status_lack_is_not_lost() -> None:
    """The pass that made it has said which attempt it is, and the next one would have said where it is."""
    cluster = Guarded()
    cluster.add(session_body(KEY.name))
    for _ in range(2):
        operator = Operator(cluster)
        operator.cache.put(cluster.objects[KEY])
        await operator.reconcile(KEY)
        await operator.poller.close()
    assert [body["metadata"]["name"] for body in cluster.made] == ["tuned-a1-0"]


async def test_a_session_is_at_rest_only_once_its_pod_was_removed() -> None:
    """A deletion that fails is repeated, and until it succeeds the status does not say that it was done."""
    cluster = Guarded()
    cluster.add(session_body(KEY.name))
    async with running(cluster) as operator:
        await until(lambda: operator.status.get("attempt") == 1)
        cluster.fail_deletions = 3
        operator.seen(cluster.edit(suspend=True))
        await until(lambda: cluster.fail_deletions == 0 or "rest" in operator.status)
        assert (cluster.fail_deletions, "rest" in operator.status) == (0, False)
        await until(lambda: "rest" in operator.status)
        assert (cluster.pods, operator.status["phase"]) == ({}, names.PHASE_STOPPING)
        pod = cluster.made[-1]
        operator.cache.drop_pod({**pod, "metadata": {**pod["metadata"], "uid": f"uid-{pod['metadata']['name']}"}})
        operator.queue.add(KEY)
        await until(lambda: operator.status["phase"] == names.PHASE_SUSPENDED)


async def test_a_deletion_that_gives_up_is_told_of() -> None:
    """With the finalizer gone nothing is left to say it but an event."""
    cluster = Guarded()
    body = session_body(KEY.name, deletion={"waitForCopies": True, "deadlineSeconds": 60})
    made = cluster.add(body)
    going = {"deletionTimestamp": text(ago(61)), "finalizers": ["other/one", names.FINALIZER_COPIES]}
    cluster.objects[KEY] = cluster.stamped(made, **going)
    pod = {
        "metadata": {
            "name": "tuned-a1-0",
            "namespace": KEY.namespace,
            "uid": "u",
            "resourceVersion": "7",
            "creationTimestamp": text(ago(100)),
            "labels": {names.LABEL_SESSION: KEY.name, names.LABEL_ATTEMPT: "1"},
            "ownerReferences": [
                {"kind": names.TRAINING_SESSION_KIND, "controller": True, "uid": made["metadata"]["uid"]}
            ],
        },
        "spec": {},
        "status": {"containerStatuses": [{"name": names.TRAINER_CONTAINER, "state": {"running": {}}}]},
    }
    cluster.pods["tuned-a1-0"] = pod
    async with running(cluster):
        await until(lambda: bool(cluster.events))
    assert cluster.written == ["finalizers ['other/one']"]
    assert [event.reason for event in cluster.events] == [names.EVENT_COPIES_MISSING]


async def test_a_budget_that_is_refused_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of, and asked for again once that may have been mended: not by every pass."""
    cluster, time = Guarded(), [NOW]
    monkeypatch.setattr("tests.operator.test_meanwhile.clock", lambda: time[0])
    budget = cluster.taken = "PodDisruptionBudget tuned-a1-0"
    operator = Operator(cluster)
    operator.cache.put(cluster.add(session_body(KEY.name, pod={"disruptionBudget": True})))
    for _ in range(3):
        await operator.reconcile(KEY)
    assert [event.reason for event in cluster.events].count(names.EVENT_CHILD_REFUSED) == 1
    assert operator.status["attempt"] == 1
    cluster.taken, time[0] = "", NOW + timedelta(seconds=PATIENCE_SECONDS)
    for _ in range(3):
        await operator.reconcile(KEY)
    assert cluster.written.count(f"apply {budget}") == 2
    await operator.poller.close()


class Frugal(Guarded):
    """A quota is used up: no claim can be made, and there is none."""

    asked = 0

    async def claim(self, namespace: str, name: str) -> Body:
        if name == "models":
            return await super().claim(namespace, name)
        raise Absent(name)

    async def create_claim(self, body: Body) -> None:
        self.asked += 1
        raise Refused("exceeded quota: storage")


async def test_a_claim_that_is_refused_is_told_of_and_not_asked_for_again_at_once() -> None:
    """A quota may be raised, but not within milliseconds: the status says why, and nobody spins."""
    cluster = Frugal()
    storage = {"journal": {"claimTemplate": {"size": "1Gi"}}}
    cluster.add(session_body(KEY.name, storage=storage))
    async with running(cluster) as operator:
        await until(lambda: "exceeded quota" in str(operator.status))
        asked = cluster.asked
        await asyncio.sleep(0.1)
        assert (cluster.asked, operator.queue.depth()) == (asked, 0)
        assert asked <= 3
    assert (cluster.made, operator.status["phase"]) == ([], names.PHASE_FAILED)


async def test_an_object_that_breaks_its_pass_delays_no_other() -> None:
    """Its passes are repeated, after a while; those of others go on meanwhile."""
    queue, done, tries = WorkQueue(), list[Key](), list[Key]()
    bad, good = Key("team", "bad"), [Key("team", f"good-{number}") for number in range(40)]

    async def reconcile(key: Key) -> None:
        if key == bad:
            tries.append(key)
            raise ZeroDivisionError
        done.append(key)

    task = asyncio.create_task(Worker(queue, {names.TRAINING_SESSION_KIND: reconcile}).run())
    for key in (bad, *good):
        queue.add(key)
    await until(lambda: len(tries) > 5 and set(done) == set(good))
    assert len(done) == len(good)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    queue.close()
