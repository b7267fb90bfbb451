"""Plays the rest of the cluster for the operator: people, scheduler, kubelets, nodes and the trainer in each pod."""

from __future__ import annotations

import base64
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx

from everloop_operator.api import names
from everloop_operator.api.tokens import master_key, session_token
from everloop_operator.core.elsewhere import LONGEST_LABEL_VALUE
from tests.networks import network
from tests.operator.control_plane import ADMIN_TOKEN, ControlPlane

T = TypeVar("T")
SESSIONS = f"/apis/{names.API_VERSION}"
RELEASE = "everloop-system"
ROOT = Path(__file__).resolve().parents[2]


def eventually(what: str, probe: Callable[[], T | None], seconds: float = 15.0) -> T:
    """The first truthy value of `probe`; fails after so many seconds."""
    give_up = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > give_up:
            raise AssertionError(f"{what}: not within {seconds} s; last seen: {value!r}")
        time.sleep(0.05)


def stamp() -> str:
    """Now, as the API server writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Api:
    """The API server, as an administrator."""

    def __init__(self, plane: ControlPlane, token: str = ADMIN_TOKEN) -> None:
        self._client = httpx.Client(
            base_url=plane.server,
            verify=ssl.create_default_context(cafile=str(plane.ca_file)),
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
            trust_env=False,
        )

    def close(self) -> None:
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        accept: str = "application/json",
    ) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        return self._client.request(method, path, content=content, headers={"Content-Type": kind, "Accept": accept})

    def get(self, path: str) -> dict[str, Any] | None:
        answer = self.request("GET", path)
        if answer.status_code == 404:
            return None
        return self._checked(answer)

    def create(self, path: str, body: Any) -> dict[str, Any]:
        return self._checked(self.request("POST", path, body))

    def merge(self, path: str, body: Any) -> dict[str, Any]:
        return self._checked(self.request("PATCH", path, body, "application/merge-patch+json"))

    def delete(self, path: str, **options: Any) -> None:
        answer = self.request("DELETE", path, options or None)
        if answer.status_code != 404:
            self._checked(answer)

    def items(self, path: str) -> list[dict[str, Any]]:
        found = self.get(path)
        return found["items"] if found else []

    @staticmethod
    def _checked(answer: httpx.Response) -> dict[str, Any]:
        assert answer.status_code < 300, answer.text
        result: dict[str, Any] = answer.json()
        return result


class FakeTrainer:
    """The server of one session pod, on a loopback address of its own: its report, and requests for snapshots."""

    def __init__(self, ip: str, token: str, report: dict[str, Any]) -> None:
        trainer = self
        self.report = report
        self.asked = 0
        self.snapshots: list[str] = []
        self.settings: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/status" or self.headers.get("Authorization") != f"Bearer {token}":
                    self.send_error(401)
                    return
                trainer.asked += 1
                body = json.dumps(trainer.report).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                if self.path != "/snapshot" or self.headers.get("Authorization") != f"Bearer {token}":
                    self.send_error(401)
                    return
                name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["id"]
                if name not in trainer.snapshots:
                    trainer.snapshots.append(name)
                trainer.report = {**trainer.report, "snapshotRequest": {"id": name, "pending": 0}}
                self.send_response(202)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_PUT(self) -> None:
                if self.path != "/settings" or self.headers.get("Authorization") != f"Bearer {token}":
                    self.send_error(401)
                    return
                trainer.settings.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                trainer.report = {**trainer.report, **trainer.settings[-1]}
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((ip, names.TRAINER_PORT), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Operator:
    """The operator as a process of its own, with the rights that its rules give it and no others."""

    def __init__(self, kubeconfig: Path, log: Path, ip: str, **environment: str) -> None:
        self.log = log
        self.ip = ip
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "operator"),
            "KUBECONFIG": str(kubeconfig),
            "EVERLOOP_RELEASE_NAMESPACE": RELEASE,
            "EVERLOOP_OPERATOR_IMAGE": "everloop-operator:test",
            "EVERLOOP_TRAINER_IMAGE": "everloop-trainer:test",
            "EVERLOOP_GATEWAY_ENDPOINT": "http://gateway.example:8000",
            "EVERLOOP_NODE_LOST_SECONDS": "1",
            "POD_IP": ip,
            **environment,
        }
        self.program = ("-m", "everloop_operator")
        """Arguments of the interpreter."""
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.program], env=self._environment, stdout=log, stderr=log
            )

    def start(self) -> None:
        self.launch()
        eventually("operator alive", self.alive, 30)

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def alive(self) -> bool:
        assert self._process
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        try:
            return httpx.get(f"http://{self.ip}:8081/healthz", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def ended(self, seconds: float) -> int:
        """Exit code, once it ends by itself."""
        assert self._process
        return self._process.wait(seconds)

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self._process
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(20)


class World:
    """A namespace of its own, with nodes of its own, in front of a running operator."""

    def __init__(self, api: Api, namespace: str, number: int) -> None:
        self.api = api
        self.namespace = namespace
        self._number = number
        self._pods = 0
        self._trainers: dict[str, FakeTrainer] = {}
        self._nodes: list[str] = []
        api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})

    def close(self) -> None:
        for session in self.api.items(self.sessions_path):
            self.api.delete(f"{self.sessions_path}/{session['metadata']['name']}")
        for pod in self.pods():
            self.remove_pod(pod["metadata"]["name"])
        for trainer in self._trainers.values():
            trainer.close()
        for node in self._nodes:
            self.api.delete(f"/api/v1/nodes/{node}")

    # --- people ---

    @property
    def sessions_path(self) -> str:
        return f"{SESSIONS}/namespaces/{self.namespace}/{names.TRAINING_SESSION_PLURAL}"

    def path(self, plural: str, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create_session(self, name: str = "tuned", **spec: Any) -> dict[str, Any]:
        return self.api.create(self.sessions_path, session_body(name, **spec))

    def session(self, name: str = "tuned") -> dict[str, Any]:
        found = self.api.get(f"{self.sessions_path}/{name}")
        assert found
        return found

    def status(self, name: str = "tuned") -> dict[str, Any]:
        return dict(self.session(name).get("status") or {})

    def condition(self, kind: str, name: str = "tuned") -> dict[str, Any]:
        return next((c for c in self.status(name).get("conditions", ()) if c["type"] == kind), {})

    def wait_phase(self, phase: str, name: str = "tuned", seconds: float = 15.0) -> dict[str, Any]:
        def probe() -> dict[str, Any] | None:
            status = self.status(name)
            return status if status.get("phase") == phase else None

        try:
            return eventually(f"phase {phase}", probe, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.status(name)}") from None

    def events(self) -> list[dict[str, Any]]:
        return self.api.items(self.path("events"))

    def pods(self) -> list[dict[str, Any]]:
        return self.api.items(self.path("pods"))

    def pod(self, name: str) -> dict[str, Any] | None:
        return self.api.get(self.path("pods", name))

    def deleting(self, name: str) -> bool:
        """Whether deletion was asked for, but no kubelet has confirmed it."""
        pod = self.pod(name)
        return pod is not None and "deletionTimestamp" in pod["metadata"]

    def wait_pod(self, name: str) -> dict[str, Any]:
        return eventually(f"pod {name}", lambda: self.pod(name))

    def claim(self, name: str, phase: str = "Bound", mode: str = "ReadWriteMany") -> None:
        self.api.create(
            self.path("persistentvolumeclaims"),
            {
                "metadata": {"name": name},
                "spec": {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}},
            },
        )
        path = self.path("persistentvolumeclaims", name)
        self.api.merge(f"{path}/status", {"status": {"phase": phase, "accessModes": [mode]}})

    def claims(self, mode: str = "ReadWriteMany") -> None:
        self.claim("training", mode=mode)
        self.claim("models", mode="ReadOnlyMany")

    # --- nodes and kubelets ---

    def node(self, suffix: str) -> str:
        name = f"{self.namespace}-{suffix}"
        labels = {names.NODE_HOSTNAME_LABEL: name} if len(name) <= LONGEST_LABEL_VALUE else {}
        self.api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        self._nodes.append(name)
        self.set_ready(name, "True")
        return name

    def set_ready(self, node: str, status: str) -> None:
        condition = {
            "type": "Ready",
            "status": status,
            "reason": "KubeletReady" if status == "True" else "NodeStatusUnknown",
            "lastTransitionTime": stamp(),
            "lastHeartbeatTime": stamp(),
        }
        self.api.merge(f"/api/v1/nodes/{node}/status", {"status": {"conditions": [condition]}})

    def master_key(self) -> bytes:
        secret = self.api.get(f"/api/v1/namespaces/{RELEASE}/secrets/{names.MASTER_KEY_SECRET}")
        assert secret
        return master_key(base64.b64decode(secret["data"]["key"]).decode())

    def token(self, pod: dict[str, Any]) -> str:
        uid = pod["metadata"]["ownerReferences"][0]["uid"]
        return session_token(self.master_key(), uid, int(pod["metadata"]["labels"][names.LABEL_ATTEMPT]))

    def run_pod(self, name: str, node: str, state: str = "Serving", **report: Any) -> FakeTrainer:
        """Binds the pod to the node and starts it, with a trainer in this state."""
        pod = self.bind_pod(name, node)
        self._pods += 1
        ip = f"{network()}.{self._number}.{self._pods}"
        trainer = FakeTrainer(ip, self.token(pod), {**report_body(pod, state), **report})
        self._trainers[name] = trainer
        self.pod_runs(name, ip)
        return trainer

    def bind_pod(self, name: str, node: str) -> dict[str, Any]:
        """The part of the scheduler, once the status tells of the pod's attempt; returns the pod."""
        pod = self.wait_pod(name)
        labels = pod["metadata"]["labels"]
        session, attempt = labels[names.LABEL_SESSION], int(labels[names.LABEL_ATTEMPT])
        # The pod is made before the status is written: until then `phase` is that of the attempt before.
        eventually(f"attempt {attempt} in the status", lambda: self.status(session).get("attempt", 0) >= attempt)
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        self.api.create(self.path("pods", name) + "/binding", binding)
        return pod

    def pod_runs(self, name: str, ip: str) -> None:
        """The part of the kubelet: the pod has this address, and its container is ready."""
        self.set_pod(name, phase="Running", podIP=ip, podIPs=[{"ip": ip}], **container({"running": {}}, ready=True))

    def set_pod(self, name: str, **status: Any) -> None:
        self.api.merge(self.path("pods", name) + "/status", {"status": status})

    def unschedulable(self, name: str, message: str) -> None:
        self.wait_pod(name)
        self.set_pod(name, conditions=[{**condition("PodScheduled", "False", "Unschedulable"), "message": message}])

    def remove_pod(self, name: str) -> None:
        """As its kubelet would, once it has ended."""
        self.api.delete(self.path("pods", name), gracePeriodSeconds=0)


def condition(kind: str, status: str, reason: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": stamp()}


def container(state: dict[str, Any], *, ready: bool = False, **more: Any) -> dict[str, Any]:
    """Pod status fields of a scheduled pod with its container in this state."""
    return {
        "conditions": [condition("PodScheduled", "True"), condition("Ready", "True" if ready else "False")],
        "containerStatuses": [
            {
                "name": names.TRAINER_CONTAINER,
                "image": "i",
                "imageID": "i",
                "ready": ready,
                "restartCount": 0,
                "state": state,
                **more,
            }
        ],
    }


def session_body(name: str = "tuned", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.TRAINING_SESSION_KIND,
        "metadata": {"name": name},
        "spec": {
            "baseModel": {"name": "base/model", "source": {"claim": {"claimName": "models", "path": "base"}}},
            "storage": {"journal": {"claim": {"claimName": "training"}}},
            **spec,
        },
    }


def report_body(pod: dict[str, Any], state: str = "Serving") -> dict[str, Any]:
    attempt = int(pod["metadata"]["labels"][names.LABEL_ATTEMPT])
    return {
        "state": state,
        "incarnation": {"number": attempt, "attempt": attempt, "boot": 1, "podUID": pod["metadata"]["uid"]},
        "lineage": "11111111-2222-3333-4444-555555555555",
        "baseModel": {"name": "base/model", "revision": "", "manifestSHA256": "ab" * 32},
        "engine": {"pid": 12, "restarts": 0},
        "models": [],
        "lastSnapshotTime": None,
        "storage": {"error": ""},
        "recoveries": [],
    }


def free_address(number: int) -> str:
    """The loopback address of an operator of this run."""
    return f"{network()}.250.{number}"
