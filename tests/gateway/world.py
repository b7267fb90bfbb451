"""The gateway's surroundings in a test: a real API server, session pods and SDK programs as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from everloop_operator.api import names, tokens
from tests.gateway.rules import CLUSTER_RULES, RELEASE_RULES
from tests.operator.control_plane import ADMIN_TOKEN, ControlPlane
from tests.prepared import client_python

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RELEASE_NAMESPACE = "everloop-system"
GATEWAY_TOKEN = "gateway-token"
GATEWAY_USER = "gateway"
CLAIM = "journal"
MASTER = "5f" * tokens.MASTER_KEY_BYTES
CATALOGUE = [{"name": "org/small", "aliases": ["small"], "tokenizer_id": "org/small-tokenizer"}]

RBAC = "rbac.authorization.k8s.io"


def _rbac(namespace: str) -> tuple[str, str]:
    """Path of a namespace's roles, or of those for all, without the plural's s; and their kind."""
    if namespace:
        return f"/apis/{RBAC}/v1/namespaces/{namespace}/role", "Role"
    return f"/apis/{RBAC}/v1/clusterrole", "ClusterRole"


def wait_for(what: str, test: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true value of `test`."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        found = test()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


def background(work: Callable[..., T], *arguments: Any, **options: Any) -> Future[T]:
    """Run something in a thread that does not outlive the test run, whatever it waits for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments, **options))
        except BaseException as error:  # noqa: BLE001 (whoever waits for the result gets it)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass
class Processes:
    """Processes that end with the test."""

    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(
        self, command: list[str], environment: dict[str, str], log: Path, **options: Any
    ) -> subprocess.Popen[Any]:
        with log.open("ab") as file:
            process = subprocess.Popen(command, env=environment, stderr=file, **({"stdout": file} | options))
        self.started.append(process)
        return process

    def stop(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.started:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # of what was said to it and it hasn't read
                        stream.close()


class Api:
    """The administrator's hands on the API server."""

    def __init__(self, plane: ControlPlane) -> None:
        context = ssl.create_default_context(cafile=str(plane.ca_file))
        self._http = httpx.Client(
            base_url=plane.server,
            verify=context,
            trust_env=False,
            timeout=10.0,
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
        )

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
        content = None if body is None else json.dumps(body)
        answer = self._http.request(method, path, content=content, headers={"Content-Type": kind})
        assert answer.is_success, f"{method} {path}: {answer.text}"
        value: dict[str, Any] = answer.json()
        return value

    def exists(self, path: str) -> bool:
        return self._http.get(path).status_code == 200

    def allowed(self, user: str, group: str, resource: str, namespace: str, verb: str = "create") -> bool:
        """May this user do that to such objects there, as the API server sees it now?"""
        attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        answer = self.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])


class Cluster:
    """The API server with everything in it that a release of Everloop brings."""

    def __init__(self, plane: ControlPlane, directory: Path) -> None:
        self.plane, self.api, self.directory = plane, Api(plane), directory
        self.kubeconfig = plane.write_kubeconfig(directory / "gateway.kubeconfig", GATEWAY_TOKEN)
        self._count = 0
        crd = yaml.safe_load((REPOSITORY / "crds" / "everloop.dev_trainingsessions.yaml").read_text())
        self.api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        self.namespace(RELEASE_NAMESPACE)
        self.grant(GATEWAY_USER, "", "gateway", CLUSTER_RULES)
        self.grant(GATEWAY_USER, RELEASE_NAMESPACE, "gateway", RELEASE_RULES)
        self.release_object("secrets", names.MASTER_KEY_SECRET, stringData={names.MASTER_KEY_FIELD: MASTER})
        self.release_object("configmaps", names.CATALOGUE_CONFIG_MAP)
        self.put_catalogue(CATALOGUE)
        wait_for("the CRD", lambda: self.api.exists(f"/apis/{names.API_VERSION}/{names.TRAINING_SESSION_PLURAL}"))

    def grant(self, user: str, namespace: str, name: str, rules: list[dict[str, Any]]) -> None:
        """Give a user these rights in a namespace, or everywhere ("")."""
        path, kind = _rbac(namespace)
        self.api.call("POST", f"{path}s", {"metadata": {"name": name}, "rules": rules})
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
            "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
        }
        self.api.call("POST", f"{path}bindings", binding)

    @contextmanager
    def withheld(self, name: str, group: str, resource: str, namespace: str) -> Iterator[None]:
        """Take the gateway's right to create such objects out of one of its ClusterRoles for a while."""
        path = f"{_rbac('')[0]}s/{name}"
        before = self.api.call("GET", path)["rules"]
        rest = [
            {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "create"]}
            if resource in rule["resources"]
            else rule
            for rule in before
        ]
        rest = [rule for rule in rest if rule["verbs"]]
        patch = "application/merge-patch+json"
        self.api.call("PATCH", path, {"rules": rest}, patch)
        try:
            wait_for("the withdrawal", lambda: not self.api.allowed(GATEWAY_USER, group, resource, namespace))
            yield
        finally:
            self.api.call("PATCH", path, {"rules": before}, patch)

    def namespace(self, name: str) -> str:
        self.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def release_object(self, plural: str, name: str, **content: Any) -> None:
        path = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/{plural}"
        self.api.call("POST", path, {"metadata": {"name": name}, **content})

    def put_catalogue(self, entries: list[dict[str, Any]]) -> None:
        """These are its entries from now on."""
        path = f"/api/v1/namespaces/{RELEASE_NAMESPACE}/configmaps/{names.CATALOGUE_CONFIG_MAP}"
        body = {"data": {names.CATALOGUE_FIELD: json.dumps(entries)}}
        self.api.call("PATCH", path, body, "application/merge-patch+json")

    def tenant(self, session: str = "small", base_model: str = "org/small") -> Tenant:
        """A namespace of its own with one TrainingSession."""
        tenant = self.empty_tenant(session)
        tenant.create_session(session, base_model)
        return tenant

    def empty_tenant(self, session: str) -> Tenant:
        """A namespace of its own in which a TrainingSession of this name may come to be."""
        self._count += 1
        return Tenant(self, self.namespace(f"team-{self._count}"), session)

    def mint_key(self, namespace: str, *options: str) -> Key:
        """An API key by the real command, not applied yet."""
        command = [sys.executable, "-m", "everloop_gateway", "mint-key", "--namespace", namespace]
        command += ["--subject", "someone", "--release-namespace", RELEASE_NAMESPACE, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=python_environment())
        return Key(self, done.stderr.strip(), json.loads(done.stdout))

    def key(self, namespace: str) -> str:
        key = self.mint_key(namespace)
        key.apply()
        return key.text


@dataclass
class Key:
    cluster: Cluster
    text: str
    manifest: dict[str, Any]

    def apply(self) -> None:
        self.cluster.api.call("POST", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/secrets", self.manifest)

    def revoke(self) -> None:
        name = self.manifest["metadata"]["name"]
        self.cluster.api.call("DELETE", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/secrets/{name}")


class Tenant:
    """A namespace with a TrainingSession whose pod's part is played by `fake_pod.py`."""

    def __init__(self, cluster: Cluster, namespace: str, session: str) -> None:
        self.cluster, self.namespace, self.session = cluster, namespace, session
        self.ledger_path = cluster.directory / f"{namespace}.ledger"
        self.path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.TRAINING_SESSION_PLURAL}"
        self.attempt = 0
        self.uid = ""
        self.lineage = str(uuid.uuid4())

    def create_session(self, name: str, base_model: str, labels: dict[str, str] | None = None) -> None:
        spec = {
            "baseModel": {"name": base_model, "source": {"claim": {"claimName": "models"}}},
            "storage": {"journal": {"claim": {"claimName": CLAIM}}},
        }
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.TRAINING_SESSION_KIND,
            "metadata": {"name": name, "labels": labels or {}},
            "spec": spec,
        }
        self.uid = self.cluster.api.call("POST", self.path, body)["metadata"]["uid"]
        self.find_claim(name)

    def find_claim(self, session: str) -> None:
        """What the operator does once it has seen a new session."""
        self._patch_status(session, storage={"claimUID": self.claim()["metadata"]["uid"]})

    def claim(self) -> dict[str, Any]:
        """The claim of the sessions' journals, which is made if there is none."""
        path = f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims"
        if not self.cluster.api.exists(f"{path}/{CLAIM}"):
            spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
            self.cluster.api.call("POST", path, {"metadata": {"name": CLAIM}, "spec": spec})
        found: dict[str, Any] = self.cluster.api.call("GET", f"{path}/{CLAIM}")
        return found

    def exists(self) -> bool:
        """Is its session there?"""
        return self.cluster.api.exists(f"{self.path}/{self.session}")

    def adopt(self) -> None:
        """Be the namespace of a session that somebody else has created."""
        self.uid = self.cluster.api.call("GET", f"{self.path}/{self.session}")["metadata"]["uid"]
        self.find_claim(self.session)

    def sessions(self) -> list[dict[str, Any]]:
        """The TrainingSessions of the namespace."""
        found: list[dict[str, Any]] = self.cluster.api.call("GET", self.path)["items"]
        return found

    def set_status(self, **status: Any) -> None:
        self._patch_status(self.session, **status)

    def _patch_status(self, session: str, **status: Any) -> None:
        path = f"{self.path}/{session}/status"
        self.cluster.api.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    def recovering(self, message: str) -> None:
        self.without_pod(names.PHASE_RECOVERING, names.REASON_RECOVERING, message)

    def without_pod(self, phase: str, reason: str, message: str, **status: Any) -> None:
        """What the operator says of a session that does not serve."""
        condition = {
            "type": names.CONDITION_SERVING,
            "status": "False",
            "reason": reason,
            "message": message,
            "lastTransitionTime": "2030-01-01T00:00:00Z",
        }
        self.set_status(phase=phase, conditions=[condition], pod=None, **status)

    def serve(self, pod: PodProcess, **status: Any) -> None:
        """What the operator does once a pod of a new attempt runs, and has opened the storage."""
        place = {"name": f"{self.session}-a{self.attempt}-0", "uid": pod.uid, "ip": pod.ip}
        running = {"phase": names.PHASE_RUNNING, "conditions": [], "attempt": pod.attempt, "pod": place, "rest": None}
        self.set_status(**running, storage=self.storage(self.lineage), **status)

    def storage(self, lineage: str) -> dict[str, str]:
        """What the status says of the storage once a pod has opened it."""
        return {"claimUID": self.claim()["metadata"]["uid"], "lineage": lineage}

    def start_pod(self, processes: Processes, ip: str) -> PodProcess:
        """A pod of the next attempt; `serve` lets the gateway know of it."""
        self.attempt += 1
        token = tokens.session_token(bytes.fromhex(MASTER), self.uid, self.attempt)
        return PodProcess(processes, ip, self.attempt, token, self.ledger_path)

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ledger_path.read_text().splitlines()]

    def accepted(self) -> list[str]:
        return [record["accepted"] for record in self.ledger() if "accepted" in record]

    def calls(self, name: str, pod: PodProcess) -> int:
        return sum(record.get("call") == name and record["pod"] == pod.uid for record in self.ledger())

    def bindings(self, kind: str = names.TYPE_BINDING) -> list[dict[str, Any]]:
        selector = f"labelSelector={names.LABEL_TYPE}={kind}"
        found = self.cluster.api.call("GET", f"/api/v1/namespaces/{self.namespace}/configmaps?{selector}")
        items: list[dict[str, Any]] = found["items"]
        return items

    def delete_session(self) -> None:
        """Delete the TrainingSession, and what it owns alone."""
        self.cluster.api.call("DELETE", f"{self.path}/{self.session}")
        self._collect(self.uid)

    def delete_claim(self) -> None:
        """Delete the claim, as far as nobody protects it here, and what it owns alone."""
        uid = self.claim()["metadata"]["uid"]
        path = f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{CLAIM}"
        self.cluster.api.call("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
        self.cluster.api.call("DELETE", path)
        self._collect(uid)

    def _collect(self, owner: str) -> None:
        """The part of the garbage collector, which does not run here."""
        path = f"/api/v1/namespaces/{self.namespace}/configmaps"
        for item in self.cluster.api.call("GET", path)["items"]:
            owners = {reference["uid"] for reference in item["metadata"].get("ownerReferences", [])}
            if owners == {owner}:
                self.cluster.api.call("DELETE", f"{path}/{item['metadata']['name']}")


class PodProcess:
    def __init__(self, processes: Processes, ip: str, attempt: int, token: str, ledger: Path) -> None:
        self.ip, self.attempt, self.uid = ip, attempt, str(uuid.uuid4())
        self._start: Callable[[], subprocess.Popen[Any]] = lambda: processes.start(
            [sys.executable, str(HERE / "fake_pod.py"), ip, self.uid, token, str(ledger)],
            python_environment(),
            ledger.with_suffix(".log"),
        )
        self.start()

    def start(self) -> None:
        """Start, or start again in place after a kill."""
        self.process = self._start()
        wait_for("session pod", lambda: answers(f"http://{self.ip}:{names.TRAINER_PORT}/"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def mode(self, mode: str) -> None:
        httpx.post(f"http://{self.ip}:{names.TRAINER_PORT}/_mode", json={"mode": mode}, trust_env=False)


class GatewayProcess:
    """A replica of the gateway, run as in its container."""

    def __init__(
        self, processes: Processes, cluster: Cluster, ip: str, log_level: str = "DEBUG", **environment: str
    ) -> None:
        """`environment` is added to what the chart sets, or replaces it."""
        self.url = f"http://{ip}:{names.GATEWAY_PORT}"
        self.log = cluster.directory / f"gateway-{ip}.log"
        environment = {
            **python_environment(),
            "POD_IP": ip,
            "EVERLOOP_RELEASE_NAMESPACE": RELEASE_NAMESPACE,
            "EVERLOOP_LOG_LEVEL": log_level,
            "KUBECONFIG": str(cluster.kubeconfig),
            **environment,
        }
        self._start: Callable[[], subprocess.Popen[Any]] = lambda: processes.start(
            [sys.executable, "-W", "error", "-m", "everloop_gateway"], environment, self.log
        )
        self.start()

    def start(self) -> None:
        self.process = self._start()
        wait_for("gateway", lambda: answers(f"{self.url}/readyz") == 200, 60.0)

    def logged(self, event: str, part: str = "") -> list[dict[str, Any]]:
        """What this replica has logged under this name, as far as a text of it contains `part`."""
        lines = self.log.read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        found = [record for record in records if record.get("event") == event]
        return [record for record in found if any(part in str(value) for value in record.values())]

    def wait_logged(self, event: str, part: str = "", count: int = 1) -> None:
        """Until it has logged that so often."""
        wait_for(f"{count} x {event!r} with {part!r} in {self.log}", lambda: len(self.logged(event, part)) >= count)

    def client(self, key: str) -> httpx.Client:
        """A client without the SDK, for what the SDK does not show."""
        return httpx.Client(base_url=f"{self.url}/api/v1", headers={"X-API-Key": key}, trust_env=False, timeout=60.0)

    @contextmanager
    def session(self, key: str) -> Iterator[tuple[httpx.Client, str]]:
        """A client without the SDK, with a session of its own."""
        with self.client(key) as client:
            wait_for("the key", lambda: client.post("/client/config").status_code == 200)
            yield client, client.post("/create_session", json={}).json()["session_id"]


class SdkProcess:
    """`sdk_client.py` in the environment that holds the SDK and nothing of ours."""

    def __init__(self, processes: Processes, url: str, key: str, scenario: str, base_model: str, log: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.log = log
        environment = {
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": key,
            "HOME": str(log.parent),
            "PATH": os.environ["PATH"],
        }
        command = [client_python(), str(HERE / "sdk_client.py"), scenario, base_model]
        pipe = subprocess.PIPE
        self.process = processes.start(command, environment, log, stdin=pipe, stdout=pipe, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def named(self, event: str) -> list[dict[str, Any]]:
        return [item for item in self.events if item["event"] == event]

    def wait(self, event: str, count: int = 1, seconds: float = 30.0) -> dict[str, Any]:
        """The `count`-th event of that name; an exception in the user's program fails the test at once."""

        def found() -> dict[str, Any] | None:
            errors = self.named("error")
            assert not errors or event == "error", errors
            matching = self.named(event)
            return matching[count - 1] if len(matching) >= count else None

        value: dict[str, Any] = wait_for(f"{event} #{count} of the SDK program", found, seconds)
        return value

    def finish(self, seconds: float = 30.0) -> None:
        """Let the program end and see that it ended well."""
        self.say("end")
        self.wait("end", seconds=seconds)
        assert self.process.wait(10) == 0


def answers(url: str) -> int | None:
    """The status with which this URL is answered, if it is."""
    try:
        return httpx.get(url, trust_env=False, timeout=1.0).status_code
    except httpx.TransportError:
        return None


def python_environment() -> dict[str, str]:
    """The environment of a process that runs our own code."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": ":".join(str(REPOSITORY / top) for top in ("operator", "trainer_image", "")),
    }
