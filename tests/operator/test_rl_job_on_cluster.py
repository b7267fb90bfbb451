"""RLJobs against a real API server, with the operator's own rights: the tests play kubelet, trainer and reader."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import pytest

from everloop_gateway import keys
from everloop_operator.api import names
from everloop_operator.api.tokens import master_key, progress_token
from tests.networks import new_address
from tests.operator import builders
from tests.operator.test_rl_job_crd import job_body
from tests.operator.world import RELEASE, SESSIONS, World, condition, eventually

pytestmark = pytest.mark.slow

T = TypeVar("T")
NAME = "poems"
TEMPLATE = {**builders.SPEC, "recovery": {"checkpointDeadlineSeconds": 0}}


def soon(what: str, probe: Callable[[], T | None]) -> T:
    """The first truthy value of `probe`, within a time in which several passes follow on each other."""
    return eventually(what, probe, 60)


class FakeReader:
    """The progress reader of one driver pod: its report, and the questions that it was asked."""

    def __init__(self, ip: str, token: str, report: dict[str, Any]) -> None:
        reader = self
        self.report = report
        self.questions: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.headers.get("Authorization") != f"Bearer {token}":
                    self.send_error(401)
                    return
                reader.questions.add(self.path)
                body = json.dumps(reader.report).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((ip, names.PROGRESS_PORT), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Jobs:
    """What the tests do around one job."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.path = f"{SESSIONS}/namespaces/{world.namespace}/{names.RL_JOB_PLURAL}"
        self.readers: list[FakeReader] = []
        self.uid = ""

    def create(self, **spec: Any) -> None:
        self.uid = self.world.api.create(self.path, job_body(NAME, **spec))["metadata"]["uid"]

    def patch(self, **spec: Any) -> None:
        self.world.api.merge(f"{self.path}/{NAME}", {"spec": spec})

    def status(self) -> dict[str, Any]:
        found = self.world.api.get(f"{self.path}/{NAME}")
        return dict((found or {}).get("status") or {})

    def wait_phase(self, phase: str, attempt: int = 0) -> dict[str, Any]:
        """The status, once it has this phase in this attempt or a later one."""

        def probe() -> dict[str, Any] | None:
            status = self.status()
            return status if status.get("phase") == phase and status["attempt"] >= attempt else None

        try:
            return soon(f"phase {phase}", probe)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.status()}") from None

    def run_driver(self, attempt: int, node: str, **report: Any) -> FakeReader:
        """Binds the driver's pod to the node and starts it, with a reader that says this."""
        world, name = self.world, f"{NAME}-driver-a{attempt}"
        soon(f"pod {name}", lambda: world.pod(name))
        secret = soon("its secret", lambda: world.api.get(world.path("secrets", name)))
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        world.api.create(world.path("pods", name) + "/binding", binding)
        token = base64.b64decode(secret["data"]["token"]).decode()
        assert token == progress_token(self.master(), self.uid, attempt)
        ip = new_address()
        reader = FakeReader(ip, token, {"state": "Started", "attempt": attempt, **report})
        self.readers.append(reader)
        running = {"image": "i", "imageID": "i", "ready": True, "restartCount": 0, "state": {"running": {}}}
        world.set_pod(
            name,
            phase="Running",
            podIP=ip,
            podIPs=[{"ip": ip}],
            conditions=[condition("PodScheduled", "True"), condition("Ready", "True")],
            containerStatuses=[{"name": names.DRIVER_CONTAINER, **running}],
            initContainerStatuses=[{"name": names.PROGRESS_CONTAINER, **running}],
        )
        return reader

    def master(self) -> bytes:
        secret = self.world.api.get(f"/api/v1/namespaces/{RELEASE}/secrets/{names.MASTER_KEY_SECRET}")
        assert secret is not None
        return master_key(base64.b64decode(secret["data"]["key"]).decode())

    def key(self) -> keys.KeyRecord | None:
        """What the gateway would know of the job's API key."""
        found = self.world.api.items(f"/api/v1/namespaces/{RELEASE}/secrets")
        own = [s for s in found if s["metadata"].get("labels", {}).get(names.LABEL_JOB_UID) == self.uid]
        return keys.record_from_secret(own[0]) if own else None

    def close(self) -> None:
        self.world.api.delete(f"{self.path}/{NAME}")
        for reader in self.readers:
            reader.close()


@pytest.fixture
def jobs(world: World) -> Iterator[Jobs]:
    made = Jobs(world)
    yield made
    made.close()


def told(iteration: int) -> dict[str, Any]:
    point = {"iteration": iteration, "checkpoint": f"tinker://m/weights/{iteration}"}
    return {"iteration": iteration, "iterations": iteration, "resume": point, "reward": "0.5"}


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in pod["spec"]["containers"][0]["env"]}


def test_job_from_its_own_session_to_its_goal(jobs: Jobs) -> None:
    """Session made, driver run, rested, resumed where it was, goal reached; key, session and pods come and go."""
    world = jobs.world
    world.claims()
    node = world.node("a")
    jobs.create(session={"ref": None, "template": {"spec": TEMPLATE}}, goal={"metric": "reward", "value": "1"})
    soon("the session's pod", lambda: world.pod(f"{NAME}-a1-0"))
    world.run_pod(f"{NAME}-a1-0", node)
    session = world.session(NAME)
    assert session["metadata"]["ownerReferences"][0]["uid"] == jobs.uid

    reader = jobs.run_driver(1, node, **told(3))
    jobs.wait_phase("Running")
    status = soon("its progress", lambda: s if "latestCheckpoint" in (s := jobs.status()) else None)
    assert (status["progress"]["iteration"], status["latestCheckpoint"]["iteration"]) == (3, 3)
    record = jobs.key()
    assert record is not None
    assert (record.namespace, record.session) == (world.namespace, NAME)
    assert any("metric=reward" in question for question in reader.questions)

    jobs.patch(suspend=True)
    jobs.wait_phase("Suspended")
    soon("the driver's end", lambda: world.deleting(f"{NAME}-driver-a1"))
    world.remove_pod(f"{NAME}-driver-a1")
    soon("the end of the key", lambda: jobs.key() is None)
    soon("the session's rest", lambda: world.session(NAME)["spec"]["suspend"])
    soon("the session pod's end", lambda: world.deleting(f"{NAME}-a1-0"))
    world.remove_pod(f"{NAME}-a1-0")
    world.wait_phase("Suspended", NAME, 60)

    jobs.patch(suspend=False)
    soon("the session's pod", lambda: world.pod(f"{NAME}-a2-0"))
    world.run_pod(f"{NAME}-a2-0", node)
    given = environment(soon("the next driver", lambda: world.pod(f"{NAME}-driver-a2")))
    assert (given["EVERLOOP_RESUME_FROM"], given["EVERLOOP_RESUME_ITERATION"]) == ("tinker://m/weights/3", "3")
    jobs.run_driver(2, node, **told(4), goalReached=4)
    status = jobs.wait_phase("Completed")
    assert status["recoveries"][-1]["reason"] == "Resumed"
    soon("the driver's end", lambda: world.deleting(f"{NAME}-driver-a2"))
    assert jobs.key() is not None
    world.remove_pod(f"{NAME}-driver-a2")
    soon("the end of the key", lambda: jobs.key() is None)
    assert world.session(NAME)["spec"]["suspend"]
    jobs.patch(ttlSecondsAfterFinished=0)
    soon("the end of the session", lambda: world.api.get(f"{world.sessions_path}/{NAME}") is None)


def test_driver_is_replaced_and_its_key_with_it(jobs: Jobs) -> None:
    """Lost with its node, then failed: budgets, keys and events, on a session that the job only names."""
    world = jobs.world
    world.claims()
    first, second = world.node("a"), world.node("b")
    world.create_session("tuned")
    world.run_pod("tuned-a1-0", second)
    jobs.create(recovery={"application": {"maxAttempts": 0}})
    jobs.run_driver(1, first, **told(2))
    jobs.wait_phase("Running")
    soon("its progress", lambda: "latestCheckpoint" in jobs.status())
    before = jobs.key()
    world.set_ready(first, "Unknown")
    pod = soon("the next driver", lambda: world.pod(f"{NAME}-driver-a2"))
    assert environment(pod)["EVERLOOP_RESUME_ITERATION"] == "2"
    jobs.run_driver(2, second, **told(2))
    status = jobs.wait_phase("Running", attempt=2)
    assert (status["recoveries"][0]["reason"], status["budgets"]["infrastructure"]["used"]) == ("NodeLost", 1)
    after = jobs.key()
    assert before is not None
    assert after is not None
    assert (before.key_id, before.sha256 == after.sha256) == (after.key_id, False)
    ended = {"exitCode": 3, "reason": "Error", "message": "no reward", "startedAt": None, "finishedAt": None}
    state = {"image": "i", "imageID": "i", "ready": False, "restartCount": 0, "state": {"terminated": ended}}
    world.set_pod(f"{NAME}-driver-a2", phase="Failed", containerStatuses=[{"name": names.DRIVER_CONTAINER, **state}])
    status = jobs.wait_phase("Failed")
    assert (status["failure"]["exitCode"], status["failure"]["logTail"]) == (3, "no reward")
    soon("the end of the key", lambda: jobs.key() is None)
    told_events = {"PodCreated", "NodeLost", "NewAttempt", "Failed"}
    soon("events", lambda: told_events <= {e["reason"] for e in world.events() if e["involvedObject"]["name"] == NAME})
